-- Which workers have a block, so that a decision finds those with a long prefix of its prompt in any fleet.
--
--   holders:<3 hex digits>  HASH  digest of a sampled block → tags of workers that have it, TAG_BYTES each
--   tags                    HASH  tag → incarnation
--
-- The hash of a digest is that of its first 12 bits. The tag of an incarnation is the beginning of its SHA-1.
--
-- One block of about HOLDER_TOKENS tokens is sampled, by its digest, so that publishers and decisions agree without
-- knowing where in a prompt a block stands. This index only finds candidates; their matches are looked up in their own
-- sets (chain.lua). So it may be incomplete and wrong: a list has room for MAX_HOLDERS workers, of which each further one
-- replaces a random one; what a dead worker or a cleared cache leaves behind is removed by the sweep, and entries of dead
-- workers by the first decision that meets them; and workers name their sampled blocks again from time to time, which
-- brings back what was evicted.

local HOLDERS_BYTES = MAX_HOLDERS * TAG_BYTES
local BUCKETS = 4096

-- One of so many blocks of `page_size` tokens is sampled: a power of 2. As in router/index.py.
local function sampling_of(page_size)
  local every = 1
  while every < MAX_SAMPLING and 2 * every * page_size <= HOLDER_TOKENS do every = every * 2 end
  return every
end

local function tag_of(incarnation)
  local digits = string.sub(redis.sha1hex(incarnation), 1, 2 * TAG_BYTES)
  return (string.gsub(digits, '..', function(byte) return string.char(tonumber(byte, 16)) end))
end

local function bucket_of(prefix, digest)
  local first, second = string.byte(digest, 1, 2)
  return prefix .. string.format('holders:%02x%x', first, (second - second % 16) / 16)
end

-- Where `tag` begins in `tags`; nil if it is not there.
local function find_tag(tags, tag)
  local from = 1
  while true do
    local at = string.find(tags, tag, from, true)
    if not at or (at - 1) % TAG_BYTES == 0 then return at end
    from = at + 1
  end
end

-- Tags of the workers that have the block; '' if there is none, or for anything but a list of tags.
local function read_holders(key, digest)
  local tags = redis.pcall('HGET', key, digest)
  if type(tags) ~= 'string' or #tags > HOLDERS_BYTES or #tags % TAG_BYTES ~= 0 then return '' end
  return tags
end

local function write_holders(key, digest, tags)
  if tags == '' then
    redis.call('HDEL', key, digest)
  elseif redis.call('HSET', key, digest, tags) == 1 then
    redis.call('PEXPIRE', key, FLEET_TTL_MS)
  end
end

local function add_holder(prefix, digest, tag)
  local key = bucket_of(prefix, digest)
  local tags = read_holders(key, digest)
  if tags == '' then drop_unless(key, 'hash') end
  if find_tag(tags, tag) then return end
  if #tags == HOLDERS_BYTES then
    local last = math.random(MAX_HOLDERS) * TAG_BYTES
    tags = string.sub(tags, 1, last - TAG_BYTES) .. tag .. string.sub(tags, last + 1)
  else
    tags = tags .. tag
  end
  write_holders(key, digest, tags)
end

local function without_tag(tags, at)
  return string.sub(tags, 1, at - 1) .. string.sub(tags, at + TAG_BYTES)
end

local function drop_holder(prefix, digest, tag)
  local key = bucket_of(prefix, digest)
  local tags = read_holders(key, digest)
  local at = find_tag(tags, tag)
  if at then write_holders(key, digest, without_tag(tags, at)) end
end

-- `change`, `add_holder` or `drop_holder`, for each sampled block of `digests`.
local function change_holders(change, prefix, digests, tag, every)
  for last = DIGEST_BYTES, #digests, DIGEST_BYTES do
    if string.byte(digests, last) % every == 0 then
      change(prefix, string.sub(digests, last - DIGEST_BYTES + 1, last), tag)
    end
  end
end

-- The release of the worker writes holders.
local function note_publisher(prefix, incarnation)
  drop_unless(prefix .. 'tags', 'hash')
  redis.call('HSET', prefix .. 'tags', tag_of(incarnation), incarnation)
  redis.call('PEXPIRE', prefix .. 'tags', FLEET_TTL_MS)
end

-- The incarnation with this tag; nil if it is not known.
local function named_by(state, tag)
  local fleet = kept_fleet(state.prefix)
  local name = fleet.names[tag]
  if name then return name end
  name = redis.pcall('HGET', state.prefix .. 'tags', tag)
  if type(name) ~= 'string' or not worker_of(name) or tag_of(name) ~= tag then return nil end
  if fleet.names_count >= MAX_KEPT then fleet.names, fleet.names_count = {}, 0 end
  fleet.names[tag], fleet.names_count = name, fleet.names_count + 1
  return name
end

-- Whether the release of this live worker writes holders.
local function publishes(state, worker)
  if not worker.publishes then
    worker.tag = worker.tag or tag_of(worker.incarnation)
    worker.publishes = named_by(state, worker.tag) == worker.incarnation
  end
  return worker.publishes
end

local function drop_tag(state, incarnation)
  local tag, fleet = tag_of(incarnation), kept_fleet(state.prefix)
  local tags = state.prefix .. 'tags'
  if redis.pcall('HGET', tags, tag) == incarnation then redis.call('HDEL', tags, tag) end
  if fleet.names[tag] == incarnation then
    fleet.names[tag], fleet.names_count = nil, fleet.names_count - 1
  end
end

-- A decision has met tags of workers that are gone: writes the list without them. Where no tag is known at all, Redis has
-- lost the tags, and not the workers.
local function forget_gone(state, digest, tags)
  if redis.call('EXISTS', state.prefix .. 'tags') == 0 then return end
  local kept = {}
  for at = 1, #tags, TAG_BYTES do
    local tag = string.sub(tags, at, at + TAG_BYTES - 1)
    if named_by(state, tag) then kept[#kept + 1] = tag end
  end
  write_holders(bucket_of(state.prefix, digest), digest, table.concat(kept))
end

-- Whether the worker with this tag still has the block.
local function still_holds(state, tag, digest)
  local name = named_by(state, tag)
  return name ~= nil and redis.pcall('SISMEMBER', state.prefix .. 'blocks:' .. name, digest) == 1
end

-- `tags` without those of workers that do not have the block any more. Looks at SWEPT_TAGS of them, others each time.
local function cleaned(state, digest, tags)
  local count = #tags / TAG_BYTES
  local first, kept = state.now % count, tags
  for step = 0, math.min(count, SWEPT_TAGS) - 1 do
    local at = (first + step) % count * TAG_BYTES
    local tag = string.sub(tags, at + 1, at + TAG_BYTES)
    if not still_holds(state, tag, digest) then kept = without_tag(kept, find_tag(kept, tag)) end
  end
  return kept
end

-- Cleans some entries of one of the hashes, and keeps it alive.
local function sweep_bucket(state, number)
  local key = state.prefix .. string.format('holders:%03x', number)
  state.dropped = state.dropped + drop_unless(key, 'hash')
  if redis.call('HLEN', key) > MAX_BUCKET_FIELDS then redis.call('UNLINK', key) end
  redis.call('PEXPIRE', key, FLEET_TTL_MS)
  local sample = redis.call('HRANDFIELD', key, SWEPT_FIELDS, 'WITHVALUES')
  for i = 1, #sample, 2 do
    local digest, tags = sample[i], sample[i + 1]
    local kept = #digest == DIGEST_BYTES and read_holders(key, digest) or ''
    if kept ~= '' then kept = cleaned(state, digest, kept) end
    if kept ~= tags then write_holders(key, digest, kept) end
  end
end

local next_bucket = 0

local function sweep_holders(state)
  for _ = 1, SWEPT_BUCKETS do
    sweep_bucket(state, next_bucket)
    next_bucket = (next_bucket + 1) % BUCKETS
  end
  local tags = state.prefix .. 'tags'
  state.dropped = state.dropped + drop_unless(tags, 'hash')
  if redis.call('HLEN', tags) > state.count + MAX_WORKERS then
    trim(tags, function(_, name) return worker_of(name) ~= nil and redis.call('HEXISTS', state.fleet, name) == 1 end)
  end
end
