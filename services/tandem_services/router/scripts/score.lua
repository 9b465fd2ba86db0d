-- The price of a choice, in seconds. router/cost.py is the same model in Python, with the reasons; a property test
-- compares both.
--
--   prefix_fetch     time to fetch a prefix from another worker beyond the queue, if that is cheaper (fetch.lua)
--   host_load        prompt tokens in host memory alone × seconds to copy one to the device
--   prefill_queue    (tokens queued + reserved) × seconds per token
--   prefill_compute  prompt tokens that are not cached or fetched, at least one × seconds per token
--   prefill_stall    prefill_compute and host_load × sequences that wait for them, now and later; eviction by fetched
--                    tokens
--   adapter_load     seconds to load an adapter that a worker lacks, beyond what happens before it is needed, and to
--                    load again what makes way for it
--   transfer         handoff messages + prompt tokens that the decode worker lacks × seconds to move one
--   decode_load      (sequences + reserved) × step time: the cost of one more sequence for the others
--   decode_room      NO_ROOM_S if the sequence would have to wait for others to finish

local function missing_after(tokens, query)
  return math.max(1, query.prompt_tokens - tokens)
end

-- Sequences that wait while a prompt is computed on a worker.
local function waiting_sequences(role, sequences)
  if role == ROLE_PREFILL then return FOLLOWERS end
  return sequences + (role == ROLE_DECODE and COMING or 0) + FOLLOWERS
end

-- Max. seconds until a worker reads its messages again.
local function turn(queue_tokens, token_s, sequences, step_s)
  return math.min(queue_tokens, TURN_TOKENS) * token_s + (sequences > 0 and step_s or 0)
end

local function transfer(worker, token_s)
  return HANDOFF_S + worker.missing * token_s
end

-- Seconds of a fetch that exceed the queue: while the fetch lasts, the queue gets shorter.
local function fetch_wait(worker, fetch_s)
  return math.max(0, fetch_s - worker.queue_s)
end

-- Prompt tokens that `worker` does not have to compute.
local function known_to(worker)
  return worker.source and worker.source.held or worker.matched
end

-- Seconds that the load of an adapter adds for `worker`, `hidden_s` of which pass anyway.
local function absent_s(worker, hidden_s)
  local absent = worker.absent
  return absent and math.max(0, absent.load_s - hidden_s) + absent.evict_s or 0
end

-- The same at the decode end of a pair.
local function absent_at_end(decode, prefill, query)
  return absent_s(decode, prefill.queue_s + missing_after(known_to(prefill), query) * prefill.token_s)
end

-- `token_s` of a pair: seconds to move one token over the link between its ends.
local function terms_of(choice, query)
  local decode = choice.decode
  local computing = choice.prefill or decode
  local known = known_to(computing)
  local compute = missing_after(known, query) * computing.token_s
  local copying = computing.back_s / (1 + computing.waiting)
  return {
    prefix_fetch = computing.source and fetch_wait(computing, computing.fetch_s) or 0, host_load = copying,
    prefill_queue = computing.queue_s, prefill_compute = compute,
    prefill_stall = (compute + copying) * computing.waiting
      + (known - computing.matched) * computing.copy_s,
    adapter_load = absent_s(computing, computing.queue_s)
      + (choice.prefill and absent_at_end(decode, choice.prefill, query) or 0),
    transfer = choice.prefill and transfer(decode, choice.token_s) or 0,
    decode_load = decode.load_s, decode_room = decode.hold_s - decode.load_s,
  }
end

-- The `limit` entries of lowest `field`. The start is random, so that the choice among equals is random.
local function shortlist(entries, field, limit)
  local count = #entries
  if count <= limit then return entries end
  local short, start = {}, math.random(count)
  for step = 1, count do
    local entry = entries[(start + step) % count + 1]
    local value, place = entry[field], #short
    if place < limit or value < short[place][field] then
      if place == limit then place = place - 1 end
      while place > 0 and value < short[place][field] do
        short[place + 1] = short[place]
        place = place - 1
      end
      short[place + 1] = entry
    end
  end
  return short
end

-- One of the entries within TIE_S of the lowest `field`, at random.
local function cheapest(entries, field)
  local best = math.huge
  for i = 1, #entries do
    if entries[i][field] < best then best = entries[i][field] end
  end
  local ties = {}
  for i = 1, #entries do
    if entries[i][field] <= best + TIE_S then ties[#ties + 1] = entries[i] end
  end
  return ties[math.random(#ties)]
end
