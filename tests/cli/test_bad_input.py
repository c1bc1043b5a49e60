"""Bad input of every command: one message that says what is wrong, the exit code of its kind, and never a traceback.

The plan is made once; what needs no model is refused before one is captured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autopar.cli.commands import public_name
from autopar.errors import AutoparError, ConfigurationError, InfeasibleError
from tests.cli.test_commands import autopar
from tests.cli.test_examples import CONFIG

pytestmark = pytest.mark.usefixtures("shared_captures")

Edit = Callable[[dict[str, Any]], object]
ON = ("--cluster", "2x4 H100-SXM", "--batch", "8", "--seq", "32", "--mode", "fast")
NO_PLAN, NO_JSON = 'a plan file begins with "schema_version"', "is damaged: JSON is malformed"
FILES = {
    "text.json": "hello", "list.json": "[1, 2]", "object.json": '{"a": 1}', "bad.toml": "a = [", "empty.toml": "",
    "words.sh": "--tensor-model-parallel-size three", "three.sh": "--tensor-model-parallel-size 3",
    "class.json": '{"architectures": "LlamaForCausalLM"}', "no_steps.json": '{"traceEvents": []}',
    "evil.json": '{"architectures": ["utils"]}',
    "hub.json": '{"architectures": ["LlamaForCausalLM"], "attn_implementation": "kernels-community/flash-attn"}',
    "wide.json": '{"architectures": ["LlamaForCausalLM"], "hidden_size": "wide"}',
}  # fmt: skip
QUESTIONS = {
    "lost.json": {"model": "hf:none.json"}, "other.json": {"batch": 4}, "many.json": {"batch": "many"},
    "optimizer.json": {"optimizer": "lion"}, "bare.json": None, "code.json": {"model": "unasked:make"},
}  # fmt: skip
"""Plan files whose question was changed by hand."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where plan.json and its configuration lie, beside files that are something else; the working directory."""
    found = tmp_path_factory.mktemp("bad")
    (found / "config.json").write_text(json.dumps(CONFIG))
    (found / "bytes.json").write_bytes(bytes(range(256)))
    (found / "folder.json").mkdir()
    for name, text in FILES.items():
        (found / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(found)
        done = autopar("plan", "hf:config.json", *ON, "-o", "plan.json")
        assert done.returncode == 0, done.stderr
        plan = json.loads((found / "plan.json").read_text())
        for name, changed in QUESTIONS.items():
            question = {} if changed is None else {**plan["question"], **changed}
            (found / name).write_text(json.dumps({**plan, "question": question}))
        (found / "unasked.py").write_text("open('ran', 'w').close()\n")
        yield found


def refused(words: str, code: int, message: str) -> None:
    """The command ends with the code and the message, in the JSON document too where it is asked for."""
    done = autopar(*words.split())
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert message in " ".join(done.stderr.split()), done.stderr
    if "--json" in words:
        assert message in " ".join(json.loads(done.stdout)["error"]["message"].split())


READERS = ("show", "memory", "edit", "report", "simulate", "explain {} x", "what-if {} --dims tp=2",
           "diff plan.json {}", "export {} --to megatron", "run --plan {} -- config.json")  # fmt: skip


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize(
    ("file", "message"),
    [("none.json", "cannot read the plan none.json"), ("text.json", NO_JSON), ("bytes.json", "byte 128 is no UTF-8"),
     ("list.json", "a plan is a JSON object"), ("object.json", NO_PLAN), ("config.json", NO_PLAN)],
)  # fmt: skip
def test_what_is_no_plan_file(folder: Path, command: str, file: str, message: str) -> None:
    words = command.format(file) if "{}" in command else f"{command} {file}"
    refused(words if command.startswith("run") else f"{words} --json", 2, message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan hf:none.json", "none.json does not exist"),
        ("plan hf:bytes.json", "bytes.json is damaged: byte 128 is no UTF-8"),
        ("plan hf:evil.json", "utils is no model of transformers"),
        ("plan hf:hub.json", "attn_implementation is 'kernels-community/flash-attn'; kernels of a hub"),
        ("plan hf:config.json --cluster 1000000000x8-H100", "cannot read cluster"),
        ("plan hf:config.json --memory-limit 0B", "memory_limit='0B' must be positive"),
        ("plan hf:list.json", 'no list of "architectures"'),
        ("plan hf:class.json", 'no list of "architectures"'),
        ("plan hf:wide.json", "expected int, got str (value: 'wide')"),
        ("plan json:dumps", "missing a required argument: 'obj'"),
        ("plan os:getcwd", "returned str; return a torch.nn.Module"),
        ("plan nothing", "write package.module:factory or hf:CONFIG.json"),
        ("plan hf:config.json --dims tp=2,tp=4", "names an axis twice"),
        ("plan hf:config.json -o config.json/plan.json", "is no folder"),
        ("plan hf:config.json -o folder.json", "is a directory"),
        ("plan hf:config.json -o nowhere/plan.json", "nowhere does not exist"),
        ("plan hf:config.json -o /dev/null", "/dev/null is a device: name a regular file"),
        ("plan hf:config.json --mode quick --json", "is not one of 'fast', 'default', 'max'"),
        ("plan --json", "Missing argument 'MODEL'"),
        ("memory lost.json", "none.json does not exist"),
        ("memory many.json", "the plan's question says batch 'many': give --batch"),
        ("memory optimizer.json", "optimizer 'lion': write one of adamw, adam, sgd, none"),
        ("memory bare.json", "does not say its model, batch, seq"),
        ("memory plan.json --cluster 2x8-H100", "cannot read cluster '2x8-H100'"),
        ("memory plan.json --cluster 8xL4", "cannot read cluster"),
        ("memory plan.json --cluster list.json", "cannot read a cluster from 'list.json'"),
        ("memory plan.json --rank x --json", "'x' is not a valid integer"),
        ("show plan.json --code -1", "-1 is not in the range"),
        ("explain plan.json", "give the NAME"),
        ("explain plan.json lm_hed --json", "the plan has no 'lm_hed'; nearest: lm_head"),
        ("explain plan.json --vs object.json", NO_PLAN),
        ("what-if plan.json", "what if what?"),
        ("what-if plan.json --dims tp", "write axis=size"),
        ("what-if plan.json --mesh 2,x", "write sizes"),
        ("what-if plan.json --constraint lm_head", "PATTERN=PLACEMENT"),
        ("edit plan.json --set lm_head", "PATTERN=PLACEMENT"),
        ("edit plan.json --set lm_head=R -o folder.json", "is a directory"),
        ("simulate bare.json", "does not say its model, batch, seq"),
        ("simulate plan.json --measured no_steps.json", "give --trace"),
        ("report plan.json --trace none.json", "cannot read the trace none.json"),
        ("report plan.json --trace text.json", "is no Chrome trace"),
        ("report plan.json --trace no_steps.json", "holds no span"),
        ("report plan.json --trace x.json --simulate", "leave one out"),
        ("report bare.json --simulate", "does not say its model, batch, seq"),
        ("export plan.json --to fairscale --json", "'fairscale' is not one of 'torchtitan'"),
        ("export bare.json --to megatron --price", "--price needs the model"),
        ("export optimizer.json --to megatron --price", "optimizer 'lion'"),
        ("import none.sh --from megatron --model hf:config.json", "cannot read the configuration none.sh"),
        ("import bytes.json --from megatron --model hf:config.json", "configuration bytes.json is damaged: byte"),
        ("import words.sh --from megatron --model hf:config.json", "is 'three'; it must be a whole number"),
        ("import three.sh --from megatron --model hf:config.json", "the degrees"),
        ("import bad.toml --from torchtitan --model hf:config.json", "bad.toml is no TOML"),
        ("import empty.toml --from torchtitan --model hf:config.json", "does not say the global batch"),
        ("import list.json --from deepspeed --model hf:config.json", "must be a table of settings"),
        ("run --plan plan.json -- nothere.py", "there is no script nothere.py"),
        ("run -- config.json", "how many processes?"),
        ("calibrate none.json none.jsonl -o new.json", "none.jsonl is not a log of steps"),
    ],
)  # fmt: skip
def test_what_cannot_mean_anything_is_said_before_a_model_is_captured(folder: Path, words: str, message: str) -> None:
    refused(words, 2, message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("memory plan.json --rank 8 --json", 2, "rank 8: the plan has the ranks 0 to 7"),
        ("memory other.json", 2, "the plan was made for another graph"),
        ("show plan.json --code 99", 2, "rank 99: the plan has the ranks 0 to 7"),
        ("explain plan.json --vs fsdpp", 2, "vs='fsdpp': write a plan, or one of ddp, fsdp"),
        ("what-if plan.json --memory-limit 1KB --json", 3, "no plan fits 1000 B per device"),
        ("what-if plan.json --memory-limit lots", 2, "write bytes, '72GiB' or a fraction"),
        ("what-if plan.json --memory-limit nan", 2, "must be positive"),
        ("what-if plan.json --dims tp=3", 2, "do not divide 8 devices"),
        ("what-if plan.json --dims tp=-1,dp_shard=-1", 2, "one axis at most"),
        ("what-if plan.json --dims sp=2", 2, "unknown axis 'sp'; axes are"),
        ("what-if plan.json --mesh 3,3", 2, "has 9 devices, the cluster 8"),
        ("what-if plan.json --micro-batches 3", 2, "does not split into 3 equal micro-batches"),
        ("what-if plan.json --constraint nothing=R", 2, "'nothing' matches no parameter, module or operator; nearest:"),
        ("what-if plan.json --constraint lm_head=Q", 2, "'Q' is no placement"),
        ("edit plan.json --set lm_head.weight=S(9)", 2, "its shape is (96, 32)"),
        ("edit plan.json --set lm_head.weight:sp=R", 2, "names axis 'sp'; the mesh has"),
        ("simulate other.json", 2, "the plan was made for another graph"),
        ("simulate plan.json --trace t.json --measured no_steps.json", 2, "it holds no operator, kernel or memory"),
    ],
)
def test_what_only_the_model_can_tell(folder: Path, words: str, code: int, message: str) -> None:
    refused(words, code, message)


def whole_edit(kind: str, name: str, placement: str) -> Edit:
    """A parameter that lies so on every axis."""

    def edit(document: dict[str, Any]) -> None:
        entry = document[kind][name]
        entry.update({field: [placement] * len(entry["stored"]) for field in ("stored", "used", "gradient")})

    return edit


def renamed(kind: str, old: str, new: str) -> Edit:
    return lambda document: document[kind].update({new: document[kind].pop(old)})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d["mesh"].update(axis_names=["tp"] * 9), "one size >= 1 per axis name"),
        (whole_edit("parameters", "transformer.wte.weight", "S(7)"), "since its shape (96, 32) has no dim 7"),
        (whole_edit("parameters", "transformer.wte.weight", "S(0, split=5)"), "since 96 does not divide into 5"),
        (whole_edit("parameters", "transformer.wte.weight", "P(sum)"), "a sum that is not complete"),
        (renamed("operators", "lm_head/mm#0", "lm_hed/mm#0"),
         "operators.lm_hed/mm#0: the model has no such operator; nearest: lm_head/mm#0"),
        (renamed("parameters", "transformer.wte.weight", "transformer.wtf.weight"),
         "parameters.transformer.wtf.weight: the model has no such parameter; nearest: transformer.wte.weight"),
        (renamed("inputs", "labels", "label"), "inputs.label: the model has no such input; nearest: labels"),
    ],
)  # fmt: skip
def test_a_file_edited_by_hand_says_what_makes_no_sense(folder: Path, edit: Edit, message: str) -> None:
    document = json.loads((folder / "plan.json").read_text())
    edit(document)
    (folder / "by_hand.json").write_text(json.dumps(document))
    refused("edit by_hand.json", 2, message)


def test_another_number_of_devices_is_another_question(folder: Path) -> None:
    for command in ("memory", "simulate", "edit"):
        done = autopar(command, "plan.json", "--cluster", "2x8 H100-SXM")
        assert (done.returncode, "the plan has 8 ranks, 2x8 H100-SXM 16 devices" in done.stderr) == (2, True)


def test_errors_carry_the_name_that_a_user_catches() -> None:
    class DoesNotFit(InfeasibleError):
        pass

    assert public_name(DoesNotFit()) == "InfeasibleError"
    assert public_name(ConfigurationError()) == "ConfigurationError"
    assert public_name(AutoparError()) == "AutoparError"


@pytest.mark.slow
def test_an_imported_plan_answers_questions(folder: Path) -> None:
    (folder / "flags.sh").write_text("--tensor-model-parallel-size 2 --global-batch-size 8 --seq-length 32")
    words = ("--from", "megatron", "--model", "hf:config.json", "--cluster", "2x4 H100-SXM", "-o", "like.json")
    assert autopar("import", "flags.sh", *words).returncode == 0
    done = autopar("memory", "like.json", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peak_bytes"] > 0


@pytest.mark.parametrize(
    "words",
    [
        "memory code.json",
        "what-if code.json --memory-limit 40GB",
        "edit code.json",
        "show code.json --code 0",
        "simulate code.json",
        "report code.json --simulate",
        "export code.json --to megatron --price",
        "explain code.json --vs fsdp",
    ],
)
def test_code_that_a_file_names_is_not_run_unasked(folder: Path, words: str) -> None:
    refused(words, 2, "names its model as code, 'unasked:make', and a file is not run unasked: give --trust")
    assert not (folder / "ran").exists()


def test_a_file_alone_explains_itself_and_trust_runs_its_code(folder: Path) -> None:
    alone = autopar("explain", "code.json", "lm_head")
    assert alone.returncode == 0
    assert "from the file alone" in alone.stderr
    for reading in (("show", "code.json"), ("diff", "code.json", "plan.json"), ("report", "code.json")):
        assert autopar(*reading).returncode == 0, reading
    assert not (folder / "ran").exists()
    refused("memory code.json --trust", 2, "'unasked:make': unasked has no function 'make'")
    assert (folder / "ran").exists()
