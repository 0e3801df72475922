-- The cluster's epoch, which is made when there is none; and what all nodes count on, made anew where
-- it is lost or is not ours: the root, the counters, the feed. Where all is well nothing is written.
-- ARGV: prefix; a new epoch; the root's inode, and its directory entry, packed; how many inodes the
-- node knows of, 0 for who does not know.
local p = ARGV[1]
local function call(...) return redis.call(...) end
local function clear_unless(kind, name)
  local found = call('TYPE', p .. name)
  if found.ok ~= 'none' and found.ok ~= kind then call('DEL', p .. name) end
end
local function counter(name)
  clear_unless('string', name)
  local text = call('GET', p .. name)
  return text and #text < 16 and string.match(text, '^%d+$') and tonumber(text)
end
local function set(name, number) call('SET', p .. name, string.format('%.0f', number)) end

clear_unless('string', 'epoch')
local epoch, is_new = call('GET', p .. 'epoch'), false
if not epoch or #epoch ~= #ARGV[2] or not string.match(epoch, '^%x+$') then
  epoch, is_new = ARGV[2], true
  call('SET', p .. 'epoch', epoch)
  call('DEL', p .. 'seq', p .. 'feed', p .. 'last', p .. 'mark')
end
local root = 'i' .. string.char(1, 0, 0, 0, 0, 0, 0, 0)
clear_unless('string', root)
local inode = call('GET', p .. root)
-- A directory, by the first word, which is its mode.
if not inode or #inode ~= #ARGV[3] or math.floor(inode:byte(2) / 16) ~= 4 or inode:sub(3, 4) ~= '\0\0' then
  call('SET', p .. root, ARGV[3])
end
local above = string.rep('\0', 8)
clear_unless('hash', 'd' .. above)
clear_unless('zset', 'e' .. above)
if call('HGET', p .. 'd' .. above, '') ~= ARGV[4] then call('HSET', p .. 'd' .. above, '', ARGV[4]) end
if not call('ZSCORE', p .. 'e' .. above, '') then call('ZADD', p .. 'e' .. above, 0, '') end

if not counter('inodes') and (is_new or tonumber(ARGV[5]) > 0) then
  set('inodes', is_new and 1 or tonumber(ARGV[5]))
end
clear_unless('string', 'mark')
clear_unless('hash', 'last')
clear_unless('stream', 'feed')
local seq = counter('seq')
local said = 0
local entry = call('XREVRANGE', p .. 'feed', '+', '-', 'COUNT', 1)[1]
if entry then
  local number = string.match(entry[1], '^(%d+)%-0$')
  if number and #number < 16 and #entry[2] == 2 and entry[2][1] == '' then
    said = tonumber(number)
  else -- somebody else's, behind which no node's would go
    call('DEL', p .. 'feed')
  end
end
if not seq or seq < said then set('seq', said) end
return epoch
