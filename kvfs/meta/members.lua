-- A node's lease on its place in the cluster, and who else is there. All by the server's own clock.
--
-- ARGV: the prefix of all keys; node id; what it says of itself, or '' to leave; for how many
-- milliseconds; the number of the last list that it saw.
-- '1' when it is new here: then it may take nobody's place that is there still.
-- Returns {number of the list, ids and words in turn}, without them when the number is the same;
-- {-1} when another one is there under this id.
local p, node, words, lease_ms, seen = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local changed = false
local there = redis.call('HGET', p .. 'members', node)
if ARGV[6] == '1' and there and there ~= words then
  local until_ms = redis.call('ZSCORE', p .. 'leases', node)
  if until_ms and tonumber(until_ms) > now_ms then return {-1} end
end
if words == '' then
  changed = redis.call('HDEL', p .. 'members', node) == 1
  redis.call('ZREM', p .. 'leases', node)
else
  if redis.call('HGET', p .. 'members', node) ~= words then
    redis.call('HSET', p .. 'members', node, words)
    changed = true
  end
  redis.call('ZADD', p .. 'leases', now_ms + lease_ms, node)
end
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', p .. 'leases', '-inf', now_ms)) do
  redis.call('ZREM', p .. 'leases', gone)
  redis.call('HDEL', p .. 'members', gone)
  changed = true
end
local number = changed and redis.call('INCR', p .. 'member-lists')
  or tonumber(redis.call('GET', p .. 'member-lists') or '0')
if tostring(number) == seen then return {number} end
return {number, redis.call('HGETALL', p .. 'members')}
