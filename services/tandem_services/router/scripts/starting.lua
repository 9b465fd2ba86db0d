-- Workers that start: for people, and for new requests without a worker. Routing reads none of this.
--
-- KEYS: 1 starting, HASH  worker_id → Redis time of its report, a space and JSON (router/starting.py)
--
-- A report counts for `STARTING_MS`. What is older, or was not written by Tandem, is removed by the next call.

local MAX_REPORT_BYTES = 2048

-- The text of a report that counts; nil for any other value.
local function report_of(value, now)
  if #value > MAX_REPORT_BYTES + 17 then return nil end
  local time, text = string.match(value, '^(%d+) (.*)$')
  time = whole(time, now)
  return time and now - time <= STARTING_MS and text or nil
end

-- All reports that count, by worker.
local function reports(key, now)
  drop_unless(key, 'hash')
  if redis.call('HLEN', key) > MAX_STARTING then redis.call('UNLINK', key) end
  local fields, found, count = redis.call('HGETALL', key), {}, 0
  for i = 1, #fields, 2 do
    local text = report_of(fields[i + 1], now)
    if text then
      found[fields[i]] = text
      count = count + 1
    else
      redis.call('HDEL', key, fields[i])
    end
  end
  return found, count
end

-- starting_report: a worker starts, or has ended to.
-- ARGV: 1 worker_id, 2 JSON; '' when it does not start any more
-- Returns 1, or 0 where `MAX_STARTING` others start.
local function starting_report(keys, args)
  local now = now_ms()
  local found, count = reports(keys[1], now)
  if args[2] == '' then
    redis.call('HDEL', keys[1], args[1])
    return 1
  end
  if not found[args[1]] and count >= MAX_STARTING then return 0 end
  redis.call('HSET', keys[1], args[1], string.format('%.0f ', now) .. args[2])
  redis.call('PEXPIRE', keys[1], STARTING_MS)
  return 1
end

-- starting_list: every worker that starts.
-- ARGV: none. Returns msgpack {JSON, …}.
local function starting_list(keys)
  local texts = {}
  for _, text in pairs((reports(keys[1], now_ms()))) do texts[#texts + 1] = text end
  return cmsgpack.pack(texts)
end

register('starting_report', starting_report)
register('starting_list', starting_list)
