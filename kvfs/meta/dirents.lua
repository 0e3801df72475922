-- Many directory entries at once. ARGV: prefix; epoch; what is asked, packed by msgpack: {group, members}
-- in turn. Returns their values in that order, 16 bytes each and zeros for none, as one string; false
-- for another epoch.
local p, epoch, asked = ARGV[1], ARGV[2], cmsgpack.unpack(ARGV[3])
if redis.call('GET', p .. 'epoch') ~= epoch then return false end
local found, none = {}, string.rep('\0', 16)
for i = 1, #asked, 2 do
  for _, value in ipairs(redis.call('HMGET', p .. 'd' .. asked[i], unpack(asked[i + 1]))) do
    found[#found + 1] = value or none
  end
end
return table.concat(found)
