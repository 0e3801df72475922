-- What happened since a node last looked. ARGV: prefix; number of the last entry seen; how many more.
-- Returns {epoch, inodes, number of the last entry, entries}.
local p = ARGV[1]
return {
  redis.call('GET', p .. 'epoch') or '',
  redis.call('GET', p .. 'inodes') or '0',
  redis.call('GET', p .. 'seq') or '0',
  redis.call('XRANGE', p .. 'feed', '(' .. ARGV[2] .. '-0', '+', 'COUNT', ARGV[3]),
}
