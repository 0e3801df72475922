-- A node's lease on its place in the cluster, and who else is there. All by the server's own clock.
--
-- ARGV: the prefix of all keys; node id; what it says of itself, or '' to leave; for how many
-- milliseconds; the number of the last list that it saw;
-- '1' when it is new here: then it may take nobody's place that is there still, but its own: of the
-- same directory (4th of the words) of the same machine (6th);
-- of how many nodes to remember when they came or went.
-- Returns {number of the list, how many are there, whether all of them follow, ids and words in turn}:
-- all for who is new or was away, else what is not as in the list that it saw, '' for who is gone;
-- the first two only when nothing is. {-1} when another one is there under this id.
local p, node, words, lease_ms, seen = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local kept = tonumber(ARGV[7])
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local changed = {}
-- What is of another kind than ours says nothing of any node.
local function clear_unless(kind, name)
  local found = redis.call('TYPE', p .. name)
  if found.ok ~= 'none' and found.ok ~= kind then redis.call('DEL', p .. name) end
end
clear_unless('hash', 'members')
for _, name in ipairs({'leases', 'gone', 'member-changes'}) do clear_unless('zset', name) end
local function counter(name)
  clear_unless('string', name)
  local text = redis.call('GET', p .. name)
  if not text then return 0 end
  return #text < 16 and string.match(text, '^%d+$') and tonumber(text)
end
local forgotten, lists = counter('member-forgotten'), counter('member-lists')
if not forgotten or not lists then -- whoever saw a list gets the next one whole
  forgotten, lists = now_ms, now_ms
  redis.call('SET', p .. 'member-forgotten', string.format('%.0f', now_ms))
  redis.call('SET', p .. 'member-lists', string.format('%.0f', now_ms))
end
local function went(id) -- `gone.lua` says for how long
  changed[#changed + 1] = id
  redis.call('ZADD', p .. 'gone', now_ms, id)
  redis.call('SET', p .. 'g' .. id, now_ms)
end
local there = redis.call('HGET', p .. 'members', node)
if ARGV[6] == '1' and there and there ~= words then
  local is_read, before = pcall(cmsgpack.unpack, there)
  local now_said = cmsgpack.unpack(words)
  local is_its_place = not is_read or type(before) ~= 'table' or before[4] == now_said[4] and before[6] ~= '' and before[6] == now_said[6]
  local until_ms = redis.call('ZSCORE', p .. 'leases', node)
  if not is_its_place and until_ms and tonumber(until_ms) > now_ms then return {-1} end
end
if words == '' then
  if redis.call('HDEL', p .. 'members', node) == 1 then went(node) end
  redis.call('ZREM', p .. 'leases', node)
else
  if not there then
    redis.call('ZREM', p .. 'gone', node)
    redis.call('DEL', p .. 'g' .. node)
  end
  if there ~= words then
    redis.call('HSET', p .. 'members', node, words)
    changed[1] = node
  end
  redis.call('ZADD', p .. 'leases', now_ms + lease_ms, node)
end
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', p .. 'leases', '-inf', now_ms)) do
  redis.call('ZREM', p .. 'leases', gone)
  redis.call('HDEL', p .. 'members', gone)
  went(gone)
end
local number
if #changed > 0 then
  number = redis.call('INCR', p .. 'member-lists')
  for _, id in ipairs(changed) do redis.call('ZADD', p .. 'member-changes', number, id) end
  local extra = redis.call('ZCARD', p .. 'member-changes') - kept
  if extra > 0 then
    local last = redis.call('ZRANGE', p .. 'member-changes', extra - 1, extra - 1, 'WITHSCORES')
    forgotten = tonumber(last[2])
    redis.call('SET', p .. 'member-forgotten', last[2])
    redis.call('ZREMRANGEBYRANK', p .. 'member-changes', 0, extra - 1)
  end
else
  number = lists
end
local count = redis.call('HLEN', p .. 'members')
if not there or seen < forgotten or seen > number then
  return {number, count, 1, redis.call('HGETALL', p .. 'members')}
end
if number == seen then return {number, count} end
local told = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', p .. 'member-changes', '(' .. seen, '+inf')) do
  told[#told + 1] = id
  told[#told + 1] = redis.call('HGET', p .. 'members', id) or ''
end
return {number, count, 0, told}
