-- One transaction of a node: compare all that it saw with what is there, then write all or nothing.
--
-- ARGV: the prefix of all keys; a map, packed by msgpack:
--   epoch, node, serial    who asks; `serial`, text, is the transaction's own, so that one whose answer
--                          was lost can be sent again
--   values {table, a, b, seen}        b: member of a group with values, or false; seen: or false
--   pages {table, group, start, limit, members}
--   writes {table, a, b, value}       value: or false to remove; true for a member without one
--   inodes                 how many there are more
--   news                   for the feed, or false; kept: how many entries the feed keeps
-- Returns {state, number, inodes, mark}: `done`, `epoch` (the server was wiped), `unsound` (a counter is
-- lost: `begin.lua` makes it anew), `value` or `page` (which of those seen has changed).
-- A key of another kind than ours is as none: what is written there takes its place. Nothing that is
-- written may fail after something was.
local p, t = ARGV[1], cmsgpack.unpack(ARGV[2])

local function call(...) return redis.call(...) end
local function fails(answer) return type(answer) == 'table' and answer.err end
local function try(...)
  local answer = redis.pcall(...)
  if not fails(answer) then return answer, true end
  if string.sub(answer.err, 1, 9) ~= 'WRONGTYPE' then error(answer) end
  return false, false
end
local function write(command, key, ...)
  local _, went = try(command, key, ...)
  if not went then
    call('DEL', key)
    call(command, key, ...)
  end
end
local function counter(name)
  local text = try('GET', p .. name)
  return text and #text < 16 and string.match(text, '^%d+$') and tonumber(text)
end
local function text(number) return string.format('%.0f', number) end

if try('GET', p .. 'epoch') ~= t.epoch then return {'epoch', 0, 0} end
local seq, inodes = counter('seq'), counter('inodes')
if not seq or not inodes then return {'unsound', 0, 0} end
local last = try('HGET', p .. 'last', t.node)
if last then
  local serial, number, mark = string.match(last, '^(.*):(%d+):(%x*)$')
  if serial == t.serial then return {'done', tonumber(number), inodes, mark} end
end
for i, c in ipairs(t.values) do
  local now
  if c[3] then now = try('HGET', p .. c[1] .. c[2], c[3]) else now = try('GET', p .. c[1] .. c[2]) end
  if now ~= c[4] then return {'value', i - 1, 0} end
end
for i, c in ipairs(t.pages) do
  local now = try('ZRANGEBYLEX', p .. c[1] .. c[2], '[' .. c[3], '+', 'LIMIT', 0, c[4]) or {}
  if #now ~= #c[5] then return {'page', i - 1, 0} end
  for j, member in ipairs(now) do
    if member ~= c[5][j] then return {'page', i - 1, 0} end
  end
end
if not t.news then return {'done', seq, inodes, ''} end
for _, w in ipairs(t.writes) do
  local key = p .. w[1] .. w[2]
  if not w[3] then
    if w[4] then call('SET', key, w[4]) else call('DEL', key) end
  else
    if type(w[4]) == 'string' then write('HSET', key, w[3], w[4]) end
    if w[4] == false and w[5] then write('HDEL', key, w[3]) end
    local order = w[5] and (p .. w[5] .. w[2]) or key
    if w[4] then write('ZADD', order, 0, w[3]) else write('ZREM', order, w[3]) end
  end
end
call('DEL', p .. 'g' .. t.node) -- who does something is not gone
if t.inodes ~= 0 then
  inodes = math.max(0, inodes + t.inodes)
  call('SET', p .. 'inodes', text(inodes))
end
-- Of this transaction and of all before it: no other history has it.
local mark = redis.sha1hex((try('GET', p .. 'mark') or '') .. t.node .. t.serial):sub(1, 16)
call('SET', p .. 'mark', mark)
seq = seq + 1
local function add()
  return redis.pcall(
    'XADD', p .. 'feed', 'MAXLEN', '~', t.kept, text(seq) .. '-0', '', t.node .. mark .. t.news
  )
end
if fails(add()) then -- the feed is no stream, or goes on behind this number
  local entry = (try('XREVRANGE', p .. 'feed', '+', '-', 'COUNT', 1) or {})[1]
  local number = entry and entry[2][1] == '' and string.match(entry[1], '^(%d+)%-0$')
  if number and #number < 16 then seq = tonumber(number) + 1 end -- the counter went back
  if not number or fails(add()) then -- with what others put there; who misses something reads anew
    call('DEL', p .. 'feed')
    local added = add()
    if fails(added) then error(added) end
  end
end
call('SET', p .. 'seq', text(seq))
write('HSET', p .. 'last', t.node, t.serial .. ':' .. text(seq) .. ':' .. mark)
return {'done', seq, inodes, mark}
