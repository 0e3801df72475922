-- The cluster's epoch, which is made with an empty root when there is none.
-- ARGV: prefix; a new epoch; the root's inode, and its directory entry, packed.
local p = ARGV[1]
if redis.call('SET', p .. 'epoch', ARGV[2], 'NX') then
  redis.call('SET', p .. 'i' .. string.char(1, 0, 0, 0, 0, 0, 0, 0), ARGV[3])
  local above = string.rep('\0', 8)
  redis.call('HSET', p .. 'd' .. above, '', ARGV[4])
  redis.call('ZADD', p .. 'e' .. above, 0, '')
  redis.call('SET', p .. 'inodes', 1)
  redis.call('DEL', p .. 'seq', p .. 'feed', p .. 'last', p .. 'mark')
end
return redis.call('GET', p .. 'epoch')
