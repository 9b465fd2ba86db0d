-- Prompts in flight: blocks that a worker will have cached soon, because a prompt with them was routed to it.
--
-- The index receives a block after it is computed, which is seconds after the decision. Without these notes equal
-- prompts that arrive together are routed to different workers, and each worker computes the same blocks.
--
-- A decision notes each 1st, 2nd or 4th of the named blocks that its computing worker lacks, and the last one. A note ends
-- when the index stores or removes the block, when the reservation of its decision is released, when the registry was
-- wiped, or when it expires. A fenced worker is in no group, so its notes are never read. Notes are in the memory of the
-- library: after a failover or a reload decisions are those without notes for some seconds.
--
-- A worker that has a note for a block will also have all blocks before it. Prompts of different lengths name different
-- blocks, so not every block of a common prefix has a note: only the last one with a note counts.

local notes = {} -- digest → decision, or a list of decisions for several workers
-- Digest at a position that is a power of 2 → when the last decision that named it expires. Two prompts with a common
-- prefix have such a block in common, so a decision without one need not look up all its blocks.
local heads = {}
local decided, oldest, newest, kept = {}, 1, 0, 0

local function add_note(digest, decision)
  local held = notes[digest]
  if not held or held.blocks == decision.blocks then
    notes[digest] = decision
  elseif held.blocks then
    notes[digest] = {held, decision}
  else
    for i = 1, #held do
      if held[i].blocks == decision.blocks then
        held[i] = decision
        return
      end
    end
    held[#held + 1] = decision
  end
end

-- Drops the note of `digest` for a worker, if it belongs to `decision` or `decision` is nil.
local function drop_note(digest, blocks, decision)
  local held = notes[digest]
  if not held then return end
  if held.blocks then
    if held.blocks == blocks and (not decision or held == decision) then notes[digest] = nil end
    return
  end
  for i = 1, #held do
    if held[i].blocks == blocks and (not decision or held[i] == decision) then
      table.remove(held, i)
      if #held == 1 then notes[digest] = held[1] end
      return
    end
  end
end

local function drop_decision(decision)
  for _, digest in ipairs(decision.digests) do drop_note(digest, decision.blocks, decision) end
  for _, digest in ipairs(decision.heads) do
    if heads[digest] == decision.expires_ms then heads[digest] = nil end
  end
  kept, decision.digests, decision.heads = kept - #decision.digests, {}, {}
end

local function drop_old_decisions(now)
  while oldest <= newest and (kept > MAX_NOTES or decided[oldest].expires_ms <= now) do
    drop_decision(decided[oldest])
    decided[oldest], oldest = nil, oldest + 1
  end
end

-- Notes the blocks of the query that `worker`, which has the first `worker.low` named blocks, will have computed in
-- `seconds`. Returns the number for `take_back_notes`, 0 if there is nothing to note.
local function note_prompt(worker, query, seconds, now, bucket)
  drop_old_decisions(now)
  if worker.page_size ~= query.block_size or worker.low >= query.named then return 0 end
  local digest, blocks, digests, firsts = query.digest, worker.blocks, {}, {}
  local expires_ms = now + EXPIRY_FACTOR * seconds * 1000 + EXPIRY_SLACK_MS
  local decision = {blocks = blocks, bucket = bucket, expires_ms = expires_ms, digests = digests, heads = firsts}
  local apart = 1
  while query.named > apart * NOTES_OF_DECISION do apart = apart * 2 end
  for position = worker.low - worker.low % apart + apart, query.named + apart - 1, apart do
    local name = digest(position < query.named and position or query.named)
    digests[#digests + 1] = name
    add_note(name, decision)
  end
  local position = 1
  while position <= query.named do
    local name = digest(position)
    if not heads[name] or heads[name] < expires_ms then heads[name], firsts[#firsts + 1] = expires_ms, name end
    position = position * 2
  end
  newest, kept = newest + 1, kept + #digests
  decided[newest] = decision
  return newest
end

-- A decision was not carried out, or its request has ended. Numbers restart when the library is loaded again, so the
-- bucket must agree.
local function take_back_notes(number, bucket)
  local decision = decided[number]
  if decision and decision.bucket == bucket then drop_decision(decision) end
end

-- The registry was wiped: earlier decisions are void.
local function drop_notes_of(prefix)
  for number = oldest, newest do
    if string.sub(decided[number].blocks, 1, #prefix) == prefix then drop_decision(decided[number]) end
  end
end

-- The index has received blocks of one worker.
local function drop_indexed_notes(blocks, digests)
  if kept == 0 then return end
  for first = 1, #digests, DIGEST_BYTES do
    drop_note(string.sub(digests, first, first + DIGEST_BYTES - 1), blocks)
  end
end

-- Key of a worker's blocks → the last named block of the query that the worker will have, of MET_HOLDERS workers with the
-- longest prefixes; nil if there is none.
local function blocks_in_flight(query, now)
  if kept == 0 then return nil end
  local digest, position, shared = query.digest, 1, false
  while position <= query.named and not shared do
    shared = (heads[digest(position)] or 0) > now
    position = position * 2
  end
  if not shared then return nil end
  local last, found = {}, 0
  for at = query.named, 1, -1 do
    local held = notes[digest(at)]
    if held then
      local count = held.blocks and 1 or #held
      for i = 1, count do
        local decision = held.blocks and held or held[i]
        if not last[decision.blocks] and decision.expires_ms > now then
          last[decision.blocks], found = at, found + 1
          if found == MET_HOLDERS then return last end
        end
      end
    end
  end
  return last
end
