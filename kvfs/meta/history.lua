-- Whether transactions that a node knows are in this server's history. ARGV: prefix; their numbers and
-- marks, packed by msgpack: {number, mark} in turn. Returns for each 1, 0 for one that is not, -1
-- where the feed does not go back as far.
local p, asked = ARGV[1], cmsgpack.unpack(ARGV[2])
local kind = redis.call('TYPE', p .. 'feed').ok
if kind ~= 'none' and kind ~= 'stream' then redis.call('DEL', p .. 'feed') end
local first = redis.call('XRANGE', p .. 'feed', '-', '+', 'COUNT', 1)[1]
local oldest = first and tonumber(string.match(first[1], '^%d+'))
local text = redis.pcall('GET', p .. 'seq')
local seq = type(text) == 'string' and tonumber(text) or 0
local found = {}
for i = 1, #asked, 2 do
  local n, mark = asked[i], asked[i + 1]
  local id = string.format('%.0f-0', n)
  local at = redis.call('XRANGE', p .. 'feed', id, id)[1]
  if at then found[#found + 1] = string.sub(at[2][2] or '', 17, 32) == mark and 1 or 0
  elseif n == 0 then found[#found + 1] = 1
  elseif n > seq or (oldest and n >= oldest) then found[#found + 1] = 0
  else found[#found + 1] = -1 end
end
return found
