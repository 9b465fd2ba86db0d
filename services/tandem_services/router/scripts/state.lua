-- Shared by all functions: the three keys, and protection from values that no part of Tandem has written.
--
-- KEYS of every registry function: 1 fleet, 2 owner, 3 meta.
-- ARGV[1] is the key prefix; worker:<id>, fenced:<incarnation>, blocks:<incarnation>, host:<incarnation>,
-- cursor:<incarnation>, links:<incarnation>, changes, kinds:<model>, least:…, holders:… and tags are derived from it and lie
-- in the same hash slot.
--
-- Redis holds hints. Every number is read by `whole`, which bounds it. The reader of a row checks its signature, because
-- it has the secret of the deployment.

local MAX_WHOLE = 9007199254740991 -- 2^53 - 1: larger ones lose their unit in a Lua number
local MAX_META_FIELDS = 64
local MAX_VERDICT_BYTES = 512
local MAX_INCARNATION_BYTES = 169 -- 128 of the worker, 40 of its number
local TRIM_STEP = 16384 -- fields of an overfull hash that one call checks: about 10 ms

local function register(name, callback)
  redis.register_function(VERSION .. '_' .. name, callback)
end

-- 1 if a key of another type was dropped, else 0.
local function drop_unless(key, expected)
  local kind = redis.call('TYPE', key).ok
  if kind == expected or kind == 'none' then return 0 end
  redis.call('UNLINK', key)
  return 1
end

-- `text` as a whole number from 0 to `limit`; nil for anything else.
local function whole(text, limit)
  if type(text) ~= 'string' or #text > 16 or not string.find(text, '^%d+$') then return nil end
  local number = tonumber(text)
  return number <= limit and number or nil
end

-- The parts of an incarnation; nil if `incarnation` is malformed.
local function worker_of(incarnation)
  if #incarnation > MAX_INCARNATION_BYTES then return nil end
  return string.match(incarnation, '^([%w%._%-]+)@(%d+)$')
end

-- Numbers are decimal and exceed the precision of a Lua number: compared as text.
local function newer(number, other)
  if #number ~= #other then return #number > #other end
  return number > other
end

-- A verdict is an incarnation, a space and a proof in hex digits; see router/deployment.py. nil for anything else.
local function read_verdict(text)
  if type(text) ~= 'string' or #text > MAX_VERDICT_BYTES then return nil end
  return string.match(text, '^([%w%._%-]+@%d+) (%x+)$')
end

-- A field of `meta`, false if it has none. A call that reads many of them has read all at once (`read_meta`).
local function meta_field(state, field)
  if state.fields then return state.fields[field] or false end
  return redis.call('HGET', state.meta, field)
end

local function set_meta(state, field, text)
  redis.call('HSET', state.meta, field, text)
  if state.fields then state.fields[field] = text end
end

local function read_meta(state)
  local fields, all = {}, redis.call('HGETALL', state.meta)
  for i = 1, #all, 2 do fields[all[i]] = all[i + 1] end
  state.fields = fields
end

-- Redis time in milliseconds in `field` of `meta`, at most `ahead` from now; 0 if it has none.
local function meta_time(state, field, ahead)
  return whole(meta_field(state, field), state.now + ahead) or 0
end

local function set_meta_time(state, field, time)
  set_meta(state, field, string.format('%.0f', time))
end

local function generation_of(state)
  return whole(meta_field(state, 'generation'), MAX_WHOLE - 1) or 0
end

-- A generation that no caller has seen before: the current time in microseconds, in which no registry has as many changes.
local function new_generation(state)
  local generation = math.max(generation_of(state) + 1, state.now * 1000)
  set_meta_time(state, 'generation', generation)
end

-- A worker joined, changed or left. A generation that was lost or overwritten starts again.
local function next_generation(state)
  local before = generation_of(state)
  if before == 0 then return new_generation(state) end
  set_meta_time(state, 'generation', before + 1)
end

-- Two random words of at most 16 hex digits: a longer epoch was not written by Tandem.
local function epoch_of(state)
  local epoch = meta_field(state, 'epoch')
  return epoch and #epoch <= 40 and string.find(epoch, '^%x+$') and epoch or nil
end

-- Entries were dropped without a release, as in a wipe. Only this call can detect that, so the registry gets a new epoch:
-- gateways keep their old view until live workers have registered again. The new generation makes all readers read all.
local function lost_entries(state)
  local epoch = epoch_of(state)
  redis.call('UNLINK', state.changes)
  new_generation(state)
  if epoch then set_meta(state, 'epoch', redis.sha1hex(epoch .. state.now)) end
end

-- Removes from an overfull hash the fields for which `keeps(field, value)` is false. Checks at most `TRIM_STEP` fields.
local function trim(key, keeps)
  local sample, dropped = redis.call('HRANDFIELD', key, TRIM_STEP, 'WITHVALUES'), 0
  for i = 1, #sample, 2 do
    if not keeps(sample[i], sample[i + 1]) then
      redis.call('HDEL', key, sample[i])
      dropped = dropped + 1
    end
  end
  return dropped
end

local function opened(keys, args, count, now, dropped)
  return {
    fleet = keys[1], owner = keys[2], meta = keys[3], changes = args[1] .. 'changes',
    prefix = args[1], now = now, dropped = dropped, count = count, fields = false,
  }
end
