-- The prefix index: one set of block digests per incarnation, and the revision it stands at.
-- An update names the revision it builds on. Any other state of the index is a gap: Redis was wiped, the
-- set was dropped as rubbish, or an update was lost; the worker then publishes its whole cache again.

local DIGEST_BYTES = 16
local SLICE = 1000 -- arguments of one command; Lua's C stack holds 8000

-- The revision of an index, -1 when there is none or it is not what we wrote. An index always holds one entry
-- that is no digest, so that a set that was evicted or dropped is not taken for an empty one.
local HOLDER = ''

local function cursor_of(blocks, cursor)
  drop_unless(blocks, 'set')
  drop_unless(cursor, 'string')
  if redis.call('EXISTS', blocks) == 0 then return -1 end
  return tonumber(redis.call('GET', cursor) or '') or -1
end

local function each_slice(digests, command, key)
  local slice = {}
  for first = 1, #digests, DIGEST_BYTES do
    slice[#slice + 1] = string.sub(digests, first, first + DIGEST_BYTES - 1)
    if #slice == SLICE then
      redis.call(command, key, unpack(slice))
      slice = {}
    end
  end
  if #slice > 0 then redis.call(command, key, unpack(slice)) end
end

-- apply_kv_events: add and remove blocks of one incarnation, in order.
-- KEYS: 1 blocks:<incarnation>, 2 cursor:<incarnation>
-- ARGV: 1 revision this update builds on, 2 revision it leads to, 3… events: a kind and its digests,
--       'S' stored, 'R' removed, 'C' everything cleared (only as the first, and then argument 1 is not checked)
-- Returns 'applied', 'repeated' (this very update had been applied: the reply got lost) or 'gap'.
local function apply_kv_events(keys, args)
  local blocks, cursor = keys[1], keys[2]
  local revision = cursor_of(blocks, cursor)
  if revision == tonumber(args[2]) then return 'repeated' end
  if args[3] ~= 'C' and revision ~= tonumber(args[1]) then return 'gap' end
  for i = 3, #args do
    local kind = string.sub(args[i], 1, 1)
    if kind == 'C' then
      redis.call('UNLINK', blocks)
      redis.call('SADD', blocks, HOLDER)
    elseif kind == 'S' then each_slice(string.sub(args[i], 2), 'SADD', blocks)
    else each_slice(string.sub(args[i], 2), 'SREM', blocks) end
  end
  redis.call('SET', cursor, args[2], 'PX', INDEX_TTL_MS)
  redis.call('PEXPIRE', blocks, INDEX_TTL_MS)
  return 'applied'
end

-- A function that tells how many leading blocks of `chain` a set of digests holds, by binary search: a worker
-- that has a block has all blocks before it. Where the set is wrong the answer is a wrong hint, never more.
-- The answer for the set before is tried first, because workers mostly share the same prefix.
local function chain_search(chain)
  local length = math.min(math.floor(#chain / DIGEST_BYTES), MAX_CHAIN_BLOCKS)
  local call, pcall, sub, floor = redis.call, redis.pcall, string.sub, math.floor
  -- Cut from the chain when they are first looked at, for all sets.
  local digests = setmetatable({}, {__index = function(cut, position)
    local digest = sub(chain, position * DIGEST_BYTES - DIGEST_BYTES + 1, position * DIGEST_BYTES)
    cut[position] = digest
    return digest
  end})
  local guess = 1

  return function(state, key)
    if length == 0 then return 0 end
    local low, high = 0, length + 1 -- low is held, high is not
    local held = pcall('SISMEMBER', key, digests[guess])
    if held == 1 then
      low = guess
      if guess < length then
        if call('SISMEMBER', key, digests[guess + 1]) == 1 then low = guess + 1 else high = guess + 1 end
      end
    elseif held == 0 then
      high = guess
      -- Most that have not what others have, have nothing.
      if guess > 1 then
        if call('SISMEMBER', key, digests[1]) == 1 then low = 1 else high = 1 end
      end
    else -- not a set
      state.dropped = state.dropped + drop_unless(key, 'set')
      return 0
    end
    while high - low > 1 do
      local middle = floor((low + high) / 2)
      if call('SISMEMBER', key, digests[middle]) == 1 then low = middle else high = middle end
    end
    if low > 0 then guess = low end
    return low
  end
end

register('apply_kv_events', apply_kv_events)
