-- The prefix index: one set of block digests per incarnation, another of the blocks that are in host memory alone, and
-- the revision of both.
-- An update names the revision that it builds on. Any other state of the index is a gap: Redis was wiped, the set was
-- dropped as malformed, or an update was lost; the worker then publishes its whole cache again.

local SLICE = 1000 -- arguments of one command; Lua's C stack holds 8000

-- The revision of an index, -1 if there is none or it is malformed. An index always has one entry that is not a digest,
-- so that an evicted or dropped set is not mistaken for an empty one.
local HOLDER = ''

local function cursor_of(blocks, cursor)
  local kept, length = redis.pcall('SISMEMBER', blocks, HOLDER), redis.pcall('STRLEN', cursor)
  if type(kept) ~= 'number' then drop_unless(blocks, 'set') end
  if type(length) ~= 'number' then drop_unless(cursor, 'string') end
  if kept ~= 1 or type(length) ~= 'number' or length == 0 or length > 16 then return -1 end
  return whole(redis.call('GET', cursor), MAX_WHOLE) or -1
end

-- What events do to the holders of their blocks.
local HOLDING = {S = add_holder, N = add_holder, R = drop_holder}

-- Events after which notes of prompts in flight about these blocks are obsolete.
local NOTED_UNTIL = {S = true, R = true}

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
-- KEYS: 1 blocks:<incarnation>, 2 cursor:<incarnation>, 3 host:<incarnation>
-- ARGV: 1 prefix, 2 incarnation, 3 tokens of a block, 4 revision this update builds on, 5 revision it leads to,
--       6… events: a kind and its digests,
--       'S' stored, 'R' removed, 'C' everything cleared (only as the first, and then argument 4 is not checked),
--       'H' stored blocks that are in host memory alone, 'D' blocks that no longer are,
--       'N' blocks that have been stored for long, for holders.lua alone
-- Returns 'applied', 'repeated' (this update had been applied, but the reply was lost) or 'gap'.
local function apply_kv_events(keys, args)
  local blocks, cursor, host = keys[1], keys[2], keys[3]
  local set = {S = {'SADD', blocks}, R = {'SREM', blocks}, H = {'SADD', host}, D = {'SREM', host}}
  local revision = cursor_of(blocks, cursor)
  if revision == tonumber(args[5]) then return 'repeated' end
  if args[6] ~= 'C' and revision ~= tonumber(args[4]) then return 'gap' end
  drop_unless(host, 'set')
  local prefix, tag, every = args[1], tag_of(args[2]), sampling_of(tonumber(args[3]))
  note_publisher(prefix, args[2])
  for i = 6, #args do
    local kind = string.sub(args[i], 1, 1)
    if kind == 'C' then
      redis.call('UNLINK', blocks, host)
      redis.call('SADD', blocks, HOLDER)
    else
      local digests = string.sub(args[i], 2)
      if set[kind] then each_slice(digests, set[kind][1], set[kind][2]) end
      if HOLDING[kind] then change_holders(HOLDING[kind], prefix, digests, tag, every) end
      if NOTED_UNTIL[kind] then drop_indexed_notes(blocks, digests) end
    end
  end
  redis.call('SET', cursor, args[5], 'PX', INDEX_TTL_MS)
  redis.call('PEXPIRE', blocks, INDEX_TTL_MS)
  redis.call('PEXPIRE', host, INDEX_TTL_MS)
  return 'applied'
end

register('apply_kv_events', apply_kv_events)
