-- The token bucket of one tenant, atomically. The rules are bucket.py's; read them there.
--
-- KEYS[1]  the bucket, a hash of level, process, mono_us, wall_us. It has no TTL: absent means full.
-- ARGV     operation ("take" or "give"), amount, capacity, refill_per_s, process, mono_us, seen_us (-1 = never)
-- Returns  {level, seconds to wait (0 = taken), this server's wall clock in microseconds}, numbers as exact decimal texts.

local operation, process = ARGV[1], ARGV[5]
local amount, capacity, refill_per_s = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local mono_us, seen_us = tonumber(ARGV[6]), tonumber(ARGV[7])
local time = redis.call('TIME')
local wall_us = tonumber(time[1]) * 1000000 + tonumber(time[2])

local function exact(number)
  return string.format('%.17g', number)
end

local function elapsed_us(bucket)
  if bucket[2] == process then
    return math.max(0, mono_us - tonumber(bucket[3]))
  end
  local elapsed = math.max(0, wall_us - tonumber(bucket[4]))
  if seen_us < 0 then
    return elapsed
  end
  return math.min(elapsed, math.max(0, mono_us - seen_us))
end

local level = capacity
local bucket = redis.call('HMGET', KEYS[1], 'level', 'process', 'mono_us', 'wall_us')
if bucket[1] and bucket[2] and bucket[3] and bucket[4] then
  level = math.min(capacity, tonumber(bucket[1]) + elapsed_us(bucket) * refill_per_s / 1000000)
end

local wait_s = 0
if operation == 'give' then
  level = math.max(-capacity, math.min(capacity, level + amount))
elseif level < amount then
  wait_s = (amount - level) / refill_per_s
else
  level = level - amount
end

redis.call('HSET', KEYS[1], 'level', exact(level), 'process', process, 'mono_us', exact(mono_us), 'wall_us', exact(wall_us))
return {exact(level), exact(wait_s), exact(wall_us)}
