-- Which worker would better fetch a prefix than compute it, and from whom. router/scoring.py is the same in Python, with
-- the reasons; a property test holds the two together.

-- Longer text than MAX_LINKS figures of the longest names is not ours.
local LINKS_BYTES = 65536

-- Seconds per token by receiver. A figure that makes no sense is left out.
local function read_links(text)
  local links = {}
  if #text > LINKS_BYTES then return links end
  for receiver, told in string.gmatch(text, '(%S+) (%S+)') do
    local figure = tonumber(told)
    if figure and figure >= 0 and figure <= BROKEN_TOKEN_S then links[receiver] = figure end
  end
  return links
end

-- What `from` measured before its last heartbeat. To whom it has no figure costs what its links cost typically.
local function links_of(from)
  if not from.read_links then
    local text = redis.pcall('GET', from.links)
    from.read_links = type(text) == 'string' and read_links(text) or {}
  end
  return from.read_links
end

-- What is the same of a source for whoever fetches from it: tokens that need not be computed then, those that do, links
-- from there, what it costs to move a token to whom it has no figure, and seconds whatever is moved. In lists of their
-- own, as each is looked at for every worker.
local function sources_of(matches, query)
  local sources = {workers = matches, tokens = {}, missing = {}, links = {}, token_s = {}, begin_s = {}}
  for i, source in ipairs(matches) do
    sources.tokens[i], sources.missing[i] = source.held, missing_after(source.held, query)
    sources.links[i], sources.token_s[i] = links_of(source), source.transfer_token_s
    sources.begin_s[i] = FETCH_S + FETCH_TURNS * source.turn_s
  end
  return sources
end

-- What `worker`, which has `matched` prompt tokens cached and computes the rest for `known_s` seconds by itself, costs if
-- it fetches where that is cheaper: seconds but for its queue and its copies from host memory, the source, and what the
-- fetch takes; without a fetch `known_s`, false and 0. While a fetch lasts, the queue gets shorter.
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

-- The PAIR_ENDS of `workers` that have most of the chain, exactly, the longest match first. Of all others it is known
-- that they have no more than the last of them, which takes a single look for most: one just beyond that.
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
