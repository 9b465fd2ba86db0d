"""No measurement counts forever, and measuring again is rare."""

from itertools import pairwise

from tandem_engine.speculative.adaptive_length import (
    FIRST_PLAIN_STEPS,
    FIRST_REST,
    FIRST_STRETCH,
    LASTING,
    MAX_REST,
    MAX_STRETCH,
    PLAIN_STEPS,
    TRIAL_STEPS,
    Trials,
)


def trial_steps(trials: Trials, steps: int) -> list[int]:
    """Which of `steps` take drafts when they are taken in trials alone."""
    tried = []
    for step in range(steps):
        if trials.trial_left:
            tried.append(step)
            trials.drafted()
        else:
            trials.plain()
    return tried


def test_first_steps_are_plain():
    trials = Trials()
    for _ in range(FIRST_PLAIN_STEPS):
        assert trials.plain_left
        trials.plain()
    assert trials.plain_left == 0


def test_plain_steps_are_remeasured_at_growing_intervals():
    trials, stretches, steps = Trials(plain_left=0), [], 0
    while len(stretches) < 8:
        if trials.plain_left:
            stretches.append(steps)
            steps = 0
            for _ in range(PLAIN_STEPS):
                trials.plain()
            assert trials.plain_left == 0
        trials.drafted()
        steps += 1
    assert stretches == sorted(stretches)
    assert (stretches[0], stretches[-1]) == (FIRST_STRETCH, MAX_STRETCH)


def test_trials_without_gain_become_rarer_up_to_a_bound():
    tried = trial_steps(Trials(), 5000)
    rests = [later - earlier - 1 for earlier, later in pairwise(tried) if later > earlier + 1]
    assert tried[:TRIAL_STEPS] == [*range(FIRST_REST, FIRST_REST + TRIAL_STEPS)]
    assert rests == sorted(rests)
    assert (rests[0], rests[-1]) == (FIRST_REST, MAX_REST)


def test_trial_waits_for_a_step_that_has_drafts():
    trials = Trials()
    for _ in range(3 * FIRST_REST):
        trials.plain()
    assert trials.trial_left == TRIAL_STEPS


def test_trial_without_drafts_ends():
    trials = Trials(trial_left=2)
    trials.tried()
    trials.tried()
    assert (trials.trial_left, trials.until_trial) == (0, FIRST_REST)


def test_lasting_draft_success_resets_trial_interval():
    trials = Trials()
    trial_steps(trials, 3000)
    while trials.trial_left:
        trials.drafted()
    trials.drafted()
    assert trials.until_trial == trials.rest > FIRST_REST
    for _ in range(LASTING):
        trials.drafted()
    assert trials.rest == FIRST_REST
