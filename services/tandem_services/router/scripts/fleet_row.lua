-- One field of `fleet`: everything that a routing decision reads about one worker, in one string.
--
--   lease_ms d, report_ms d               Redis time: end of the lease; when the load below was measured
--   role B (1 prefill, 2 decode, 3 both), offered B (0 while draining or stalled)
--   page_size I4, context_length I4, model c8, compat c16
--   queue_tokens d, token_s d (seconds to compute a prompt token), sequences d, step_s d, room_tokens d,
--   max_sequences d, transfer_token_s d (seconds to move a token over a typical link from here)   packed with the line before by registry.py; 90 bytes
--   then any number of reservations: load that routing has added and the report does not include yet
--     bucket d (start in ms), queue tokens I4, sequences I4, room tokens I4
--
-- Reservations are summed per quarter second. One stops counting when the report is younger than it, or after
-- RESERVATION_MS; the next write of the row drops it, so a row has a dozen at most and needs no sweep.

local ROW = '<ddBBI4I4c8c16ddddddd'
local ROW_BYTES = 106
local PAYLOAD_BYTES = 90
local RESERVATION = '<dI4I4I4'
local RESERVATION_BYTES = 20

local ROLE_PREFILL = 1
local ROLE_DECODE = 2
local ROLE_BOTH = 3

local MAX_ROW_BYTES = ROW_BYTES + RESERVATION_BYTES * (16 + 4 * RESERVATION_MS / RESERVATION_BUCKET_MS)

local function well_sized(row)
  return #row >= ROW_BYTES and #row <= MAX_ROW_BYTES and (#row - ROW_BYTES) % RESERVATION_BYTES == 0
end

-- A lease ends at most one lease from now; a later end is malformed or from before a clock jump.
local function lease_state(row, now)
  if not well_sized(row) then return 'malformed', 0 end
  local lease_ms = struct.unpack('<d', row)
  if not (lease_ms <= now + LEASE_MS) then return 'malformed', 0 end
  if lease_ms >= now then return 'live', lease_ms end
  return 'lapsed', lease_ms
end

local function counts(bucket, now, report_ms)
  local ended = bucket + RESERVATION_BUCKET_MS
  return bucket <= now and ended > report_ms and ended > now - RESERVATION_MS
end

-- The reservations of `row` that are still valid after a report of `report_ms`, as they are stored.
local function standing_reservations(row, now, report_ms)
  if not row or not well_sized(row) then return '' end
  local kept = {}
  for first = ROW_BYTES + 1, #row, RESERVATION_BYTES do
    if counts(struct.unpack('<d', row, first), now, report_ms) then
      kept[#kept + 1] = string.sub(row, first, first + RESERVATION_BYTES - 1)
    end
  end
  return table.concat(kept)
end

local function clamp(value)
  return math.max(0, math.min(value, 4294967295))
end

-- `row` with its last reservation, that of `bucket`, changed. Expired ones are dropped when the next bucket begins.
local function with_last_changed(row, bucket, queue, sequences, room)
  local first = #row - RESERVATION_BYTES + 1
  local _, q, s, r = struct.unpack(RESERVATION, row, first)
  return string.sub(row, 1, first - 1)
    .. struct.pack(RESERVATION, bucket, clamp(q + queue), clamp(s + sequences), clamp(r + room))
end

local function last_bucket(row)
  return #row > ROW_BYTES and struct.unpack('<d', row, #row - RESERVATION_BYTES + 1)
end

-- `row` with the reservation of one bucket changed, and without expired ones.
local function with_reservation(row, now, bucket, queue, sequences, room)
  local _, report_ms = struct.unpack('<dd', row)
  if last_bucket(row) == bucket and counts(bucket, now, report_ms) then
    return with_last_changed(row, bucket, queue, sequences, room)
  end
  local standing = standing_reservations(row, now, report_ms)
  local parts, found = {string.sub(row, 1, ROW_BYTES)}, false
  for first = 1, #standing, RESERVATION_BYTES do
    local at, q, s, r = struct.unpack(RESERVATION, standing, first)
    if at == bucket then
      q, s, r, found = q + queue, s + sequences, r + room, true
    end
    parts[#parts + 1] = struct.pack(RESERVATION, at, clamp(q), clamp(s), clamp(r))
  end
  -- Releasing an expired reservation must not add anything.
  if not found and queue >= 0 and sequences >= 0 then
    parts[#parts + 1] = struct.pack(RESERVATION, bucket, clamp(queue), clamp(sequences), clamp(room))
  end
  return table.concat(parts)
end
