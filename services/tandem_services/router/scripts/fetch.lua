-- Which worker should fetch a prefix instead of computing it, and from which source. router/scoring.py is the same in
-- Python, with the reasons; a property test compares both.

-- Longer text than MAX_LINKS values of the longest names was not written by a worker.
local LINKS_BYTES = 65536

-- Seconds per token by receiver. Malformed values are skipped.
local function read_links(text)
  local links = {}
  if #text > LINKS_BYTES then return links end
  for receiver, text_s in string.gmatch(text, '(%S+) (%S+)') do
    local token_s = tonumber(text_s)
    if token_s and token_s >= 0 and token_s <= BROKEN_TOKEN_S then links[receiver] = token_s end
  end
  return links
end

-- Links that `from` measured before its last heartbeat. A receiver without a value costs what a typical link costs.
local function links_of(from)
  if not from.read_links then
    local text = redis.pcall('GET', from.links)
    from.read_links = type(text) == 'string' and read_links(text) or {}
  end
  return from.read_links
end

-- Values of each source that are the same for every receiver: tokens that need not be computed after a fetch, tokens that
-- must be, links from the source, seconds per token to a receiver without a measured link, and seconds before the first
-- token. In separate lists, because each is read for every worker.
local function sources_of(matches, query)
  local sources = {workers = matches, tokens = {}, missing = {}, links = {}, token_s = {}, begin_s = {}}
  for i, source in ipairs(matches) do
    sources.tokens[i], sources.missing[i] = source.held, missing_after(source.held, query)
    sources.links[i], sources.token_s[i] = links_of(source), source.transfer_token_s
    sources.begin_s[i] = FETCH_S + FETCH_TURNS * source.turn_s
  end
  return sources
end

-- The cost of `worker`, which has `matched` prompt tokens cached and needs `known_s` seconds to compute the rest, with the
-- cheapest fetch: seconds without its queue and its copies from host memory, the source, and the seconds of the fetch;
-- without a cheaper fetch `known_s`, false and 0. While a fetch lasts, the queue gets shorter.
local function cheapest_fetch(worker, matched, known_s, sources)
  local tokens, missing, links = sources.tokens, sources.missing, sources.links
  local token_s, begin_s = sources.token_s, sources.begin_s
  local incarnation, work_s, copy_s, queue_s = worker.incarnation, worker.work_s, worker.copy_s, worker.queue_s
  local chosen, chosen_s = false, 0
  for i = 1, #tokens do
    local moved = tokens[i] - matched
    if moved <= 0 then break end -- the longest come first
    local cost = missing[i] * work_s + moved * copy_s
    if cost >= known_s then break end -- the others leave more to compute, which costs more than a copy
    local seconds = begin_s[i] + moved * (links[i][incarnation] or token_s[i])
    if seconds > queue_s then cost = cost + seconds - queue_s end
    if cost < known_s then known_s, chosen, chosen_s = cost, sources.workers[i], seconds end
  end
  return known_s, chosen, chosen_s
end

-- The PAIR_ENDS of `workers` with the longest matches, exactly, the longest first. The matches of all others are at most
-- as long as the last of these, which takes one lookup for most workers: the block after it.
local function longest_matches(workers, query)
  local search, digest, block_size, named = query.search, query.digest, query.block_size, query.named
  local pcall, count, found, least = redis.pcall, #workers, {}, 0
  local at, beyond = math.random(count), named > 0 and digest(1)
  for _ = 1, count do
    at = at % count + 1
    local worker = workers[at]
    -- Pages of another size than the chain's cannot match.
    local low, high = 0, worker.page_size == block_size and named or 0
    if high > least then
      local held = pcall('SISMEMBER', worker.blocks, beyond)
      if held == 0 then high = least elseif held == 1 then low = least + 1 end
    end
    worker.low, worker.high = low, high
    if high > least then
      search(worker, least)
      low = worker.low
      if low > least then
        local place = #found
        if place == PAIR_ENDS then place = place - 1 end
        while place > 0 and low > found[place].low do
          found[place + 1] = found[place]
          place = place - 1
        end
        found[place + 1] = worker
        if #found == PAIR_ENDS then
          least = found[PAIR_ENDS].low
          if least < named then beyond = digest(least + 1) end
        end
      end
    end
  end
  return found
end
