-- The time of everything that a function decides: Redis's own, in milliseconds.

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
