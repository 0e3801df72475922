-- Some of the digests of which the server says that one of some nodes has a copy.
-- ARGV: prefix; where the walk over all keys is; how many keys to look at; the ids of the nodes.
-- Returns {where it is then, '0' at the end, digests}.
local p = ARGV[1]
local walked = redis.call('SCAN', ARGV[2], 'MATCH', p .. 'o*', 'COUNT', ARGV[3])
local found = {}
for _, key in ipairs(walked[2]) do
  for i = 4, #ARGV do
    local score = redis.pcall('ZSCORE', key, ARGV[i]) -- a table: an error, of a key of another kind
    if type(score) == 'string' then
      found[#found + 1] = string.sub(key, #p + 2)
      break
    end
  end
end
return {walked[1], found}
