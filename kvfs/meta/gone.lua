-- Nodes that have been gone for long and may have left something, by the server's clock.
-- ARGV: prefix; for how many milliseconds; how many of them at most; a node that left nothing, or ''.
-- Returns their ids.
local p = ARGV[1]
local now = redis.call('TIME')
local until_ms = now[1] * 1000 + math.floor(now[2] / 1000) - tonumber(ARGV[2])
local found = redis.call('TYPE', p .. 'gone').ok
if found ~= 'none' and found ~= 'zset' then redis.call('DEL', p .. 'gone') end
local function forget(id)
  redis.call('ZREM', p .. 'gone', id)
  redis.call('DEL', p .. 'g' .. id)
end
if ARGV[4] ~= '' and redis.call('EXISTS', p .. 'l' .. ARGV[4]) == 0 then forget(ARGV[4]) end
found = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', p .. 'gone', '-inf', until_ms, 'LIMIT', 0, ARGV[3])) do
  local there = redis.pcall('HEXISTS', p .. 'members', id) -- an error: of no kind of ours
  if there == 1 then forget(id) else found[#found + 1] = id end
end
return found
