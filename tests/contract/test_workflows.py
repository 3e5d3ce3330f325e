"""Workflows are pinned, ask for little, and end; forms are what GitHub reads as forms.

actionlint and zizmor judge the rest: `make lint` and the hooks run them.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".github"
WORKFLOWS = sorted((FOLDER / "workflows").glob("*.yml"))
FORMS = sorted(f for f in (FOLDER / "ISSUE_TEMPLATE").glob("*.yml") if f.name != "config.yml")
PIN = re.compile(r"uses: ([\w.-]+/[\w./-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)$")


def _load(path: Path) -> dict[str, Any]:
    # YAML 1.1 reads the key `on` as true.
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {("on" if key is True else key): value for key, value in document.items()}


def _jobs(path: Path) -> dict[str, dict[str, Any]]:
    return _load(path)["jobs"]


def _steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in _jobs(path).values() for step in job.get("steps", [])]


def _by_name(path: Path) -> str:
    return path.name


every_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=_by_name)


def unpinned(text: str) -> list[str]:
    """Return the lines that use an action by anything but a full commit and its version."""
    lines = [line.strip().removeprefix("- ") for line in text.splitlines()]
    used = [line for line in lines if line.startswith("uses: ") and "uses: ./" not in line]
    return [line for line in used if not PIN.search(line)]


def test_the_expected_workflows_are_there() -> None:
    assert {path.stem for path in WORKFLOWS} == {"ci", "docs", "benchmark", "gpu", "release"}


@every_workflow
def test_every_action_is_pinned_by_commit_and_names_its_version(path: Path) -> None:
    assert unpinned(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "      - uses: actions/checkout@v7",
        "      - uses: actions/checkout@3d3c42e # v7.0.1",
        "        uses: actions/checkout@3d3c42e5aac5ba805825da76410c181273ba90b1",
    ],
)
def test_a_tag_a_short_commit_and_a_commit_without_version_are_unpinned(line: str) -> None:
    assert unpinned(line) == [line.strip().removeprefix("- ")]


def test_one_action_has_one_commit_in_all_workflows() -> None:
    found: dict[str, set[tuple[str, str]]] = {}
    for path in WORKFLOWS:
        for line in path.read_text(encoding="utf-8").splitlines():
            if pin := PIN.search(line):
                found.setdefault(pin[1], set()).add((pin[2], pin[3]))
    assert len(found) >= 7, "the pattern that finds actions no longer matches them"
    assert {action: pins for action, pins in found.items() if len(pins) > 1} == {}


@every_workflow
def test_a_workflow_starts_with_no_permission_and_each_job_names_its_own(path: Path) -> None:
    assert _load(path)["permissions"] == {}
    assert [name for name, job in _jobs(path).items() if "permissions" not in job] == []


@every_workflow
def test_nothing_may_write_but_the_deployment_and_the_release(path: Path) -> None:
    writes = {
        (path.stem, name, scope)
        for name, job in _jobs(path).items()
        for scope, access in job["permissions"].items()
        if access != "read"
    }
    assert writes <= {
        ("docs", "deploy", "pages"),
        ("docs", "deploy", "id-token"),
        ("release", "attest", "id-token"),
        ("release", "attest", "attestations"),
        ("release", "publish", "id-token"),
    }


@every_workflow
def test_every_job_has_a_time_limit(path: Path) -> None:
    unlimited = [
        name
        for name, job in _jobs(path).items()
        if "uses" not in job and not isinstance(job.get("timeout-minutes"), int)
    ]
    assert unlimited == []


@every_workflow
def test_a_checkout_leaves_no_credentials_behind(path: Path) -> None:
    checkouts = [s for s in _steps(path) if s.get("uses", "").startswith("actions/checkout@")]
    assert [s for s in checkouts if s.get("with", {}).get("persist-credentials") is not False] == []


@every_workflow
def test_workflows_of_one_branch_do_not_pile_up(path: Path) -> None:
    concurrency = _load(path)["concurrency"]
    assert concurrency["group"].startswith(path.stem)
    assert "cancel-in-progress" in concurrency


@every_workflow
def test_no_workflow_uses_a_secret_or_runs_a_strangers_code_with_rights(path: Path) -> None:
    assert "secrets." not in path.read_text(encoding="utf-8")
    assert not {"pull_request_target", "workflow_run"} & set(_load(path)["on"])


@every_workflow
def test_commands_take_no_expression(path: Path) -> None:
    """What is pasted into a script could be code; values go through the environment."""
    assert [step["run"] for step in _steps(path) if "${{" in step.get("run", "")] == []


@every_workflow
def test_commands_name_make_targets_and_scripts_that_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    commands = "\n".join(step.get("run", "") for step in _steps(path))
    assert set(re.findall(r"\bmake (?:-C \w+ )?([\w-]+)", commands)) - targets == set()
    named = re.findall(r"\bscripts/[\w.]+", commands)
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_one_required_check_waits_for_every_job() -> None:
    jobs = _jobs(FOLDER / "workflows" / "ci.yml")
    check = jobs["required-checks-pass"]
    assert set(check["needs"]) == set(jobs) - {"required-checks-pass"}
    assert check["if"] == "always()", "skipped counts as passed"


def test_the_tests_run_on_every_python_that_is_promised() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    prefix = "Programming Language :: Python :: 3."
    promised = [
        c.removeprefix("Programming Language :: Python :: ")
        for c in data["project"]["classifiers"]
        if c.startswith(prefix)
    ]
    jobs = _jobs(FOLDER / "workflows" / "ci.yml")
    assert jobs["tests"]["strategy"]["matrix"]["python"] == promised


def test_the_wheel_is_tested_without_the_sources_and_released_as_it_was_tested() -> None:
    commands = [s.get("run", "") for s in _jobs(FOLDER / "workflows" / "ci.yml")["tests"]["steps"]]
    assert any("rm -rf src\nmake test WHEEL=" in command for command in commands)
    release = _jobs(FOLDER / "workflows" / "release.yml")
    assert release["checks"]["uses"] == "./.github/workflows/ci.yml"
    assert release["attest"]["needs"] == "checks"
    assert release["publish"]["needs"] == "attest"
    assert "build" not in "".join(step.get("run", "") for step in release["publish"]["steps"])


def test_a_self_hosted_runner_never_serves_a_pull_request() -> None:
    for path in WORKFLOWS:
        jobs = _jobs(path).values()
        if any("self-hosted" in job.get("runs-on", "") for job in jobs):
            assert set(_load(path)["on"]) == {"schedule", "workflow_dispatch"}


def test_dependabot_renews_the_actions_and_the_constraints() -> None:
    document = _load(FOLDER / "dependabot.yml")
    assert document["version"] == 2
    assert {u["package-ecosystem"] for u in document["updates"]} == {"github-actions", "pip"}
    assert [u for u in document["updates"] if u["cooldown"]["default-days"] < 7] == []


@pytest.mark.parametrize("path", FORMS, ids=_by_name)
def test_a_form_has_what_github_asks_of_one(path: Path) -> None:
    form = _load(path)
    assert set(form) == {"name", "description", "labels", "body"}
    fields = [item for item in form["body"] if item["type"] != "markdown"]
    assert {item["type"] for item in fields} <= {"input", "textarea", "dropdown", "checkboxes"}
    identities = [item["id"] for item in fields]
    assert len(identities) == len(set(identities)) > 0
    assert all(item["attributes"]["label"] for item in fields)
    assert any(item.get("validations", {}).get("required") for item in fields)


def test_there_is_a_form_for_each_kind_of_report() -> None:
    assert {path.stem for path in FORMS} == {"bug", "feature", "performance"}


def test_the_hooks_check_workflows_too() -> None:
    document = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = {hook["id"] for repo in document["repos"] for hook in repo["hooks"]}
    assert {"actionlint", "zizmor"} <= hooks
