"""The tests of learning/ are themselves tested: each error that is planted here, in a copy, makes one of them fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Error(NamedTuple):
    """An error: what is written in vla_stream/learning/<module>.py instead of what, and the tests that shall see it."""

    name: str
    module: str
    right: str
    wrong: str
    tests: str


ERRORS = [
    # GAE
    Error("sign of V", "advantages", "gamma * bootstrap_TB - values_TB", "gamma * bootstrap_TB + values_TB",
          "advantages"),
    Error("λ left out", "advantages", "gamma * lam * torch.where", "gamma * torch.where", "advantages"),
    Error("λ off by one", "advantages", "torch.where(goes_on_TB[t],", "torch.where(goes_on_TB[t - 1],", "advantages"),
    Error("truncation taken for termination", "advantages", "bootstrap_TB = torch.where(terminated_TB, zero",
          "bootstrap_TB = torch.where(terminated_TB | truncated_TB, zero", "advantages"),
    Error("truncation taken for no end", "advantages", "goes_on_TB = valid_TB & ~(terminated_TB | truncated_TB)",
          "goes_on_TB = valid_TB & ~terminated_TB", "advantages"),
    Error("bootstrap from after the reset", "advantages",
          "successors_TB[final_index_N2[:, 0], final_index_N2[:, 1]] = final_N", "pass", "advantages"),
    Error("held rows in the sum", "advantages", "deltas_TB = torch.where(valid_TB, ",
          "deltas_TB = torch.where(~terminated_TB, ",
          "advantages"),
    Error("other std", "advantages", "exact.std(correction=0)", "exact.std(correction=1)", "advantages"),
    Error("mean not taken away", "advantages", "(exact - exact.mean())", "exact", "advantages"),
    # V-trace
    Error("trace off by one", "vtrace", "* traces_TB[t] *", "* traces_TB[t - 1] *", "vtrace"),
    Error("trace not cut at 1", "vtrace", "lam * ratios_TB.clamp(max=1.0)", "lam * ratios_TB", "vtrace"),
    Error("ρ not capped", "vtrace", "ratios_TB.clamp(max=rho_cap)", "ratios_TB", "vtrace"),
    Error("one cap for both", "vtrace", "ratios_TB.clamp(max=gradient_rho_cap)", "ratios_TB.clamp(max=rho_cap)",
          "vtrace"),
    Error("traces go on over an end", "vtrace", "torch.where(goes_on_TB[t], following_B, 0.0)", "following_B",
          "vtrace"),
    Error("V of the next step instead of its target", "vtrace", "(bootstrap_TB + next_errors_TB)", "bootstrap_TB",
          "vtrace"),
    # Groups
    Error("biased std", "groups", "correction=1", "correction=0", "groups"),
    Error("a row among the others", "groups", "others = len(returns_B) - 1", "others = len(returns_B)", "groups"),
    Error("one step after the end", "groups", "(earlier_TB == 0)", "(earlier_TB <= 1)", "groups"),
    Error("the reward of the end lost", "groups", "- (ends_TB & valid_TB).long()", "", "groups"),
    Error("divided by the longest instead of the own length", "groups", 'if length == "own"', 'if length == "max"',
          "groups"),
    # Losses
    Error("sign of the loss", "losses", "return -surrogate", "return surrogate", "losses"),
    Error("the better of both", "losses", "torch.minimum(ratio * gain", "torch.maximum(ratio * gain", "losses"),
    Error("clipped from above only", "losses", "ratio.clamp(1 - clip, 1 + clip)", "ratio.clamp(max=1 + clip)",
          "losses"),
    Error("clipped from below only", "losses", "ratio.clamp(1 - clip, 1 + clip)", "ratio.clamp(min=1 - clip)",
          "losses"),
    Error("dual clip on the wrong side", "losses", "torch.where(gain < 0", "torch.where(gain > 0", "losses"),
    Error("weight not detached", "losses", "(proximal - behaviour).detach().exp()", "(proximal - behaviour).exp()",
          "losses"),
    Error("weight upside down", "losses", "(proximal - behaviour).detach()", "(behaviour - proximal).detach()",
          "losses"),
    Error("weights masked below the cap", "losses", "torch.where(weights > cap", "torch.where(weights < cap", "losses"),
    Error("guessed policy not detached", "losses", "logprobs.detach()", "logprobs", "losses"),
    Error("guessed policy one version off", "losses", "proximal_version + 1", "proximal_version + 2", "losses"),
    Error("KL the other way", "losses", "reference - logprobs", "logprobs - reference", "losses"),
    Error("log π detached", "losses", "* torch.where(mask, logprobs, 0.0)",
          "* torch.where(mask, logprobs.detach(), 0.0)",
          "losses"),
    Error("not executed actions in a chunk", "losses", "torch.where(executed_NH, values_NHA.sum(-1), 0.0).sum(-1)",
          "values_NHA.sum(-1).sum(-1)", "losses"),
    Error("missing mask", "losses", "return executed_NH if granularity", "return executed_NH | True if granularity",
          "losses"),
    Error("masked elements in the divisor", "losses", "torch.where(mask, shares, 0.0).sum()", "shares.sum()", "losses"),
    Error("the smaller value loss", "losses", "torch.maximum(_huber", "torch.minimum(_huber", "losses"),
    Error("value clip left out", "losses", ".clamp(-clip, clip)", "", "losses"),
    Error("Huber without its linear part", "losses", "delta * (size - 0.5 * delta)", "0.5 * size.square()", "losses"),
    # Compositions
    Error("equal groups trained", "algorithms", "return counted_TB & (not groups.all_equal(returns_B))",
          "return counted_TB",
          "algorithms"),
    Error("failures imitated", "algorithms", "& counted_TB).any(0)", "& counted_TB).any(0).logical_not()",
          "algorithms"),
    Error("success taken for no end", "algorithms", "segment.success | segment.terminated", "segment.terminated",
          "algorithms"),
    Error("lengths in chunk steps", "algorithms", "torch.where(rollout.trained, rollout.elements, 0.0)",
          "torch.where(rollout.trained, 1.0, 0.0)", "algorithms"),
    Error("V-trace's weight twice", "algorithms", "Credit(traced.gains,", "Credit(traced.advantages,", "algorithms"),
    Error("the return without V", "algorithms", "advantages_TB + rollout.values,", "advantages_TB,", "algorithms"),
    Error("π_prox's weight for truncated importance sampling", "algorithms",
          "losses.behaviour_weights(logprobs, behaviour", "losses.behaviour_weights(proximal, behaviour", "algorithms"),
    Error("corrected where it shall not be", "algorithms", "return clipped, torch.ones_like(clipped)",
          "return clipped, losses.behaviour_weights(proximal, behaviour, cap, above)", "algorithms"),
    # Objective
    Error("entropy punished", "objective", "total = total - algorithm.entropy", "total = total + algorithm.entropy",
          "update"),
    Error("KL rewarded", "objective", "total = total + algorithm.reference", "total = total - algorithm.reference",
          "algorithms"),
    Error("value detached", "objective", "        evaluation.values,", "        evaluation.values.detach(),", "update"),
    Error("coefficient of the value lost", "objective", "algorithm.value_coefficient * value_loss", "value_loss",
          "algorithms"),
    Error("the ratio is to the newest weights", "objective",
          "proximal, entropy = elements(samples.proximal)", "proximal, entropy = logprobs.detach()", "update"),
    Error("the ratio is to the behaviour policy", "objective",
          "proximal, entropy = elements(samples.proximal)", "proximal, entropy = behaviour", "algorithms"),
    Error("means per micro-batch", "objective",
          "+ count.detach().double()\n            found = self._ranks.gradients(loss, ",
          "+ torch.ones_like(count).double()\n            found = self._ranks.gradients(loss / count, ", "streaming"),
    Error("one divisor for all terms", "objective", "Sum(value_total, value_loss.elements)",
          "Sum(value_total, policy_loss.elements)", "update streaming"),
    Error("length weights left out", "objective", "spread(samples.weights) * importance", "importance", "algorithms"),
    # Samples
    Error("terminated rows bootstrap", "samples", "bootstraps = trained & ~segment.terminated", "bootstraps = trained",
          "update"),
    Error("truncated rows twice", "samples", "        bootstraps[final_index[:, 0], final_index[:, 1]] = False", "",
          "update"),
    Error("the reference is the policy itself", "samples", "_evaluate(reference, ", "_evaluate(policy, ", "algorithms"),
    # Update
    Error("normalised per minibatch", "update",
          "samples, places[index[own[index]]], advantages)",
          "samples.take(index), np.arange(len(index)), normalise(advantages[torch.from_numpy(index)]))", "update"),
    Error("scaled by this update's moments", "update", "self._moments.scale(samples.advantages)",
          "self._moments.after(samples.advantages).scale(samples.advantages)", "streaming"),
    Error("V and π_prox by weights that have moved", "update", "with self._as_it_started(), ",
          "with contextlib.nullcontext(), ", "streaming"),
    Error("an update of nothing keeps its steps", "update",
          "        if problem is not None:\n            self._restore()", "",
          "update"),
    Error("demonstrations at full weight", "update", "self.algorithm.imitation_coefficient * share * loss",
          "share * loss", "algorithms"),
    Error("demonstrations with noise that no replay knows", "update", "with self._draws(-1, tally.optimiser_steps):",
          "with contextlib.nullcontext():", "algorithms"),
    Error("the rates fall one update early", "update", "decay.factor(self.updates_done)",
          "decay.factor(self.updates_done + 1)",
          "algorithms"),
    Error("the entropy bonus never falls", "update", "self.algorithm.at(self.updates_done)", "self.algorithm",
          "algorithms"),
    Error("stopped while near", "update", "kl_since_step() > most", "kl_since_step() < most", "algorithms"),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.name)
def test_the_planted_error_still_has_its_place(error: Error) -> None:
    text = (ROOT / "vla_stream" / "learning" / f"{error.module}.py").read_text(encoding="utf-8")
    assert text.count(error.right) == 1, "the code has changed: plant this error anew"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.name)
def test_a_planted_error_makes_a_test_fail(error: Error, tmp_path: Path) -> None:
    for folder in ("vla_stream", "tests/learning"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests/toy.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    module = tmp_path / "vla_stream" / "learning" / f"{error.module}.py"
    module.write_text(module.read_text(encoding="utf-8").replace(error.right, error.wrong), encoding="utf-8")
    # From the copy's folder: `python -m` looks for vla_stream there first.
    tests = [f"tests/learning/test_{name}.py" for name in error.tests.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout[-2000:]
    assert "failed" in done.stdout.splitlines()[-1] and str(tmp_path) not in done.stderr, done.stdout[-2000:]
