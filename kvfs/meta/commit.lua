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
-- Returns {state, number, inodes, mark}: `done`, `epoch` (the server was wiped), `value` or `page` (which of
-- those seen has changed).
local p, t = ARGV[1], cmsgpack.unpack(ARGV[2])

local function call(...) return redis.call(...) end
local function inodes() return tonumber(call('GET', p .. 'inodes') or '0') end

if call('GET', p .. 'epoch') ~= t.epoch then return {'epoch', 0, 0} end
local last = call('HGET', p .. 'last', t.node)
if last then
  local serial, seq, mark = string.match(last, '^(.*):(%d+):(%x*)$')
  if serial == t.serial then return {'done', tonumber(seq), inodes(), mark} end
end
for i, c in ipairs(t.values) do
  local now
  if c[3] then now = call('HGET', p .. c[1] .. c[2], c[3]) else now = call('GET', p .. c[1] .. c[2]) end
  if now ~= c[4] then return {'value', i - 1, 0} end
end
for i, c in ipairs(t.pages) do
  local now = call('ZRANGEBYLEX', p .. c[1] .. c[2], '[' .. c[3], '+', 'LIMIT', 0, c[4])
  if #now ~= #c[5] then return {'page', i - 1, 0} end
  for j, member in ipairs(now) do
    if member ~= c[5][j] then return {'page', i - 1, 0} end
  end
end
local seq = tonumber(call('GET', p .. 'seq') or '0')
if not t.news then return {'done', seq, inodes(), ''} end
for _, w in ipairs(t.writes) do
  local key = p .. w[1] .. w[2]
  if not w[3] then
    if w[4] then call('SET', key, w[4]) else call('DEL', key) end
  else
    if type(w[4]) == 'string' then call('HSET', key, w[3], w[4]) end
    if w[4] == false and w[5] then call('HDEL', key, w[3]) end
    local order = w[5] and (p .. w[5] .. w[2]) or key
    if w[4] then call('ZADD', order, 0, w[3]) else call('ZREM', order, w[3]) end
  end
end
call('DEL', p .. 'g' .. t.node) -- who does something is not gone
if t.inodes ~= 0 then call('INCRBY', p .. 'inodes', t.inodes) end
seq = call('INCR', p .. 'seq')
-- Of this transaction and of all before it: no other history has it.
local mark = redis.sha1hex((call('GET', p .. 'mark') or '') .. t.node .. t.serial):sub(1, 16)
call('SET', p .. 'mark', mark)
call('XADD', p .. 'feed', 'MAXLEN', '~', t.kept, seq .. '-0', '', t.node .. mark .. t.news)
call('HSET', p .. 'last', t.node, t.serial .. ':' .. seq .. ':' .. mark)
return {'done', seq, inodes(), mark}
