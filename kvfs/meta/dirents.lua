-- Many directory entries at once. ARGV: prefix; epoch; keys, packed by msgpack: {group, member} in turn.
-- Returns their values, 16 bytes each and zeros for none, as one string; false for another epoch.
local p, epoch, asked = ARGV[1], ARGV[2], cmsgpack.unpack(ARGV[3])
if redis.call('GET', p .. 'epoch') ~= epoch then return false end
local found, none = {}, string.rep('\0', 16)
for i = 1, #asked, 2 do
  found[#found + 1] = redis.call('HGET', p .. 'd' .. asked[i], asked[i + 1]) or none
end
return table.concat(found)
