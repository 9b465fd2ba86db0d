-- Usage of one tenant, exact over all gateways: requests and tokens of the last minute, and running requests.
--
--   usage:<tenant>    HASH  'r' or 't' and a second of Redis time → requests or tokens taken in that second
--   running:<tenant>  ZSET  request → end of its lease, unless its gateway renews it
--
-- A second counts until it has been over for a minute, so no minute exceeds the limit. `usage_counters.py` is the same in
-- Python, while Redis is unavailable.

local MAX_USAGE = 1000000000000 -- requests or tokens of one second
local MAX_USAGE_FIELDS = 4 * (USAGE_WINDOW_S + 2) -- a window has half as many; with more it is malformed

local function second_of(field)
  return whole(string.sub(field, 2), MAX_WHOLE)
end

local function open_usage(keys)
  drop_unless(keys[1], 'hash')
  drop_unless(keys[2], 'zset')
  if redis.call('HLEN', keys[1]) > MAX_USAGE_FIELDS then redis.call('UNLINK', keys[1]) end
end

-- The seconds of one kind that still count, oldest first, and their sum.
local function window(fields, kind, now_s)
  local seconds, sum = {}, 0
  for i = 1, #fields, 2 do
    local second, amount = second_of(fields[i]), whole(fields[i + 1], MAX_USAGE)
    if string.sub(fields[i], 1, 1) == kind and second and amount
        and second >= now_s - USAGE_WINDOW_S and second <= now_s then
      seconds[#seconds + 1] = {second = second, amount = amount}
      sum = sum + amount
    end
  end
  table.sort(seconds, function(a, b) return a.second < b.second end)
  return {seconds = seconds, sum = sum}
end

local function leaves_ms(entry, now)
  return (entry.second + USAGE_WINDOW_S + 1) * 1000 - now
end

-- Milliseconds until `amount` fits under `limit`; -1 if it never does.
local function retry_ms(taken, amount, limit, now)
  if amount > limit then return -1 end
  local left = taken.sum
  for _, entry in ipairs(taken.seconds) do
    left = left - entry.amount
    if left + amount <= limit then return leaves_ms(entry, now) end
  end
  return 0
end

local function reset_ms(taken, now)
  local newest = taken.seconds[#taken.seconds]
  return newest and leaves_ms(newest, now) or 0
end

local function forget_old_seconds(key, fields, now_s)
  for i = 1, #fields, 2 do
    local second = second_of(fields[i])
    if not second or second < now_s - USAGE_WINDOW_S or second > now_s then redis.call('HDEL', key, fields[i]) end
  end
end

local function add_usage(key, kind, second, amount)
  local field = kind .. string.format('%d', second)
  local held = whole(redis.call('HGET', key, field), MAX_USAGE) or 0
  redis.call('HSET', key, field, string.format('%.0f', math.max(0, math.min(held + amount, MAX_USAGE))))
  redis.call('PEXPIRE', key, (USAGE_WINDOW_S + 2) * 1000)
end

local function fits(taken, amount, limit)
  return limit == 0 or amount == 0 or taken.sum + amount <= limit
end

-- usage_take: take requests, tokens and a lease, all or nothing.
-- KEYS: 1 usage:<tenant>, 2 running:<tenant>
-- ARGV: 1 requests per minute, 2 tokens per minute, 3 requests at once (0: no limit), 4 requests, 5 tokens,
--       6 name of the lease ('' for none), 7 its milliseconds
-- Returns msgpack {refused = '' | requests | tokens | concurrency, second, retry_ms, requests, requests_reset_ms,
--   tokens, tokens_reset_ms}: the usage after the call, the time until it is 0 again, and when to retry.
local function usage_take(keys, args)
  open_usage(keys)
  local now = now_ms()
  local now_s = math.floor(now / 1000)
  local request_limit, token_limit, running_limit = tonumber(args[1]), tonumber(args[2]), tonumber(args[3])
  local requests, tokens, lease = tonumber(args[4]), tonumber(args[5]), args[6]
  local fields = redis.call('HGETALL', keys[1])
  local taken_requests, taken_tokens = window(fields, 'r', now_s), window(fields, 't', now_s)
  local refused, wait = '', 0
  if not fits(taken_requests, requests, request_limit) then
    refused, wait = 'requests', retry_ms(taken_requests, requests, request_limit, now)
  elseif not fits(taken_tokens, tokens, token_limit) then
    refused, wait = 'tokens', retry_ms(taken_tokens, tokens, token_limit, now)
  elseif lease ~= '' and running_limit > 0 then
    redis.call('ZREMRANGEBYSCORE', keys[2], '-inf', now)
    redis.call('ZREMRANGEBYSCORE', keys[2], '(' .. string.format('%.0f', now + tonumber(args[7])), '+inf')
    if redis.call('ZCARD', keys[2]) >= running_limit then refused, wait = 'concurrency', 0 end
  end
  if refused == '' then
    forget_old_seconds(keys[1], fields, now_s)
    if requests > 0 then add_usage(keys[1], 'r', now_s, requests) end
    if tokens > 0 then add_usage(keys[1], 't', now_s, tokens) end
    if lease ~= '' then
      redis.call('ZADD', keys[2], now + tonumber(args[7]), lease)
      redis.call('PEXPIRE', keys[2], tonumber(args[7]))
    end
    fields = redis.call('HGETALL', keys[1])
    taken_requests, taken_tokens = window(fields, 'r', now_s), window(fields, 't', now_s)
  end
  return cmsgpack.pack({
    refused = refused, second = now_s, retry_ms = wait,
    requests = taken_requests.sum, requests_reset_ms = reset_ms(taken_requests, now),
    tokens = taken_tokens.sum, tokens_reset_ms = reset_ms(taken_tokens, now),
  })
end

-- usage_settle: a request has ended.
-- KEYS: as of usage_take
-- ARGV: 1 the second in which its tokens were taken, 2 tokens used in addition; below 0: tokens not used,
--       3 name of its lease ('' for none)
-- Returns 1.
local function usage_settle(keys, args)
  open_usage(keys)
  local now_s = math.floor(now_ms() / 1000)
  local second, tokens = tonumber(args[1]), tonumber(args[2])
  if tokens > 0 then
    add_usage(keys[1], 't', now_s, tokens)
  elseif tokens < 0 and redis.call('HGET', keys[1], 't' .. string.format('%d', second)) then
    -- In the second in which they were taken: that second may have left the window already.
    add_usage(keys[1], 't', second, tokens)
  end
  if args[3] ~= '' then redis.call('ZREM', keys[2], args[3]) end
  return 1
end

-- usage_renew: requests that still run. An expired lease is not renewed: its request has ended in the meantime.
-- KEYS: as of usage_take
-- ARGV: 1 milliseconds of a lease, 2… names of leases. Returns 1.
local function usage_renew(keys, args)
  drop_unless(keys[2], 'zset')
  local now = now_ms()
  for i = 2, #args do
    if redis.call('ZSCORE', keys[2], args[i]) then redis.call('ZADD', keys[2], now + tonumber(args[1]), args[i]) end
  end
  redis.call('PEXPIRE', keys[2], tonumber(args[1]))
  return 1
end

register('usage_take', usage_take)
register('usage_settle', usage_settle)
register('usage_renew', usage_renew)
