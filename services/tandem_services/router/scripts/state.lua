-- What every function shares: the four keys, and protection from rubbish.
--
-- KEYS of every registry function: 1 fleet, 2 owner, 3 fenced, 4 meta.
-- ARGV[1] is the key prefix; worker:<id>, blocks:<incarnation> and cursor:<incarnation> are derived from
-- it and lie in the same hash slot.

local EXPECTED_TYPES = {'hash', 'hash', 'zset', 'hash'}

local function register(name, callback)
  redis.register_function(VERSION .. '_' .. name, callback)
end

-- 1 when a key of another type had to be dropped, else 0.
local function drop_unless(key, expected)
  local kind = redis.call('TYPE', key).ok
  if kind == expected or kind == 'none' then return 0 end
  redis.call('UNLINK', key)
  return 1
end

-- Entries were lost that nobody took back, as in a wipe. Whoever dropped them is the only one that can tell, so
-- the registry gets a new epoch: gateways keep their old view until the living have registered again.
local function lost_entries(meta)
  local epoch = redis.call('HGET', meta, 'epoch')
  if epoch then redis.call('HSET', meta, 'epoch', redis.sha1hex(epoch .. now_ms())) end
end

local function opened(keys, args, count, dropped)
  return {
    fleet = keys[1], owner = keys[2], fenced = keys[3], meta = keys[4],
    prefix = args[1], now = now_ms(), dropped = dropped, count = count,
  }
end

-- The registry as one table. A key that somebody filled with another type is dropped and counted.
local function open(keys, args)
  local dropped = 0
  for i, key in ipairs(keys) do
    dropped = dropped + drop_unless(key, EXPECTED_TYPES[i])
  end
  local count = redis.call('HLEN', keys[1])
  if count > MAX_WORKERS then
    redis.call('UNLINK', keys[1])
    dropped, count = dropped + 1, 0
  end
  if dropped > 0 then lost_entries(keys[4]) end
  return opened(keys, args, count, dropped)
end

-- The same for a decision, of which there are thousands a second: it uses `fleet` and `meta` alone, and what has a length
-- as a hash is one. The others are looked at with the next heartbeat.
local function open_to_route(keys, args)
  local count, fields = redis.pcall('HLEN', keys[1]), redis.pcall('HLEN', keys[4])
  if type(count) ~= 'number' or count > MAX_WORKERS or type(fields) ~= 'number' then return open(keys, args) end
  return opened(keys, args, count, 0)
end

local function meta_number(state, field)
  return tonumber(redis.call('HGET', state.meta, field) or '') or 0
end

-- Another one after each heartbeat, whichever release has carried it out, and when somebody comes or goes.
local function meta_stamp(state)
  return (redis.call('HGET', state.meta, 'last_call') or '') .. ' ' .. (redis.call('HGET', state.meta, 'generation') or '')
end

local function worker_of(incarnation)
  return string.match(incarnation, '^(.+)@(%d+)$')
end

-- Numbers are decimal and beyond the precision of a Lua number: compared as text.
local function newer(number, other)
  if #number ~= #other then return #number > #other end
  return number > other
end
