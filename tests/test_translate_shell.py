"""Shell scripts read as data: what bash would make of the words, and that nothing runs."""

import subprocess

import pytest

from gpt_pretrain.translate.shell import read_script
from gpt_pretrain.translate.shell_words import UNKNOWN


def words_of(text, **environment):
    """The words of the last command."""
    return [UNKNOWN.sub(r"<\1>", word) for word in read_script(text, environment).commands[-1].words]


# Each line is also given to bash, which has to print the same words.
SCRIPTS = {
    "plain": "run --a 1 --b=2",
    "quotes": "run 'a b' \"c d\" e\\ f g'h'\"i\"",
    "variable": "X=3; run $X ${X} \"$X\" '$X' a${X}b",
    "default": 'Y=""; run ${X:-3} ${Y:-4} ${Y-5} "${X:-a b}" ${X:-c d} ${Y:+6} ${Z:=7} $Z',
    "array": 'A=(--a 1\n  # a comment )\n  --b "two words"\n); run ${A[@]} "${A[@]}" ${A[1]}',
    "array that grows": 'A=(); A+=(x); A+=("y z"); B=(q); A+=("${B[@]}"); run "${A[@]}"',
    "elements of two words": 'A=("--fp8-format hybrid"); run ${A[@]} "${A[@]}"',
    "arithmetic": "N=4; G=8; run $((N * G)) $(($N*$G+1)) $(( (N + 2) / 4 )) $((7 % 4)) $((-7 / 2)) $((${N}-1))",
    "continuation": "run a \\\n  b \\\n  c",
    "comment after a continuation": "A=(\n  # --x 1 \\\n  --y 2 \\\n); run ${A[@]}",
    "comment": "run a # b\n",
    "no comment": "run a#b 'c # d'",
    "if": 'T=fp8; if [ "$T" = "fp8" ]; then A=1; else A=2; fi; run $A',
    "elif": "T=3; if [[ $T -gt 5 ]]; then A=1; elif [[ $T == 3 ]]; then A=2; else A=3; fi; run $A",
    "and, or": 'T=a; if [[ "$T" == "b" ]] || [[ -n "$T" && "$T" != "c" ]]; then A=1; else A=2; fi; run $A',
    "nested": "T=1; if [ $T -eq 2 ]; then if [ 1 -eq 1 ]; then A=1; fi; else A=3; fi; run $A",
    "not": 'if ! [ -z "x" ]; then A=1; else A=2; fi; run $A',
    "case": "M=7b; case $M in 1b) L=16 ;; 7b|8b) L=32 ;; *) L=0 ;; esac; run $L",
    "string of options": 'O=" \\\n  --a 1 \\\n  --b 2 "; run ${O} "$O"',
    "appended string": 'O="--a 1"; O+=" --b 2"; run $O',
    "redirections": "run a 2>&1 > /dev/null\nrun b",
    "export": "export X=5; run $X",
    "empty": 'X=""; run $X "$X" a',
    "pattern": 'M=llama3_8b; if [[ $M == llama3* ]]; then A=1; fi; run $A "a*"',
}


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_words_are_bashs(text):
    shown = subprocess.run(
        ["bash", "-c", f'run() {{ printf "%s\\n" "$@" > /dev/stderr; echo ==== > /dev/stderr; }}\n{text}'],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    *_, last = shown.removesuffix("====\n").split("====\n")
    assert "\n".join(words_of(text)[1:]) == last.removesuffix("\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run --data $DATA", ["run", "--data", "<DATA>"]),
        ("run $1 ${2}", ["run", "<1>", "<2>"]),
        ("run ${1:-a}", ["run", "a"]),
        ("run $(date)", ["run", "<$(date)>"]),
        ("run `date`", ["run", "<`date`>"]),
        ("X=$(nproc); run $((X * 2))", ["run", "<$(nproc)>"]),
        ("run ${X%/*}", ["run", "<${X%/*}>"]),
        ("run $((2 ** 70)) $((x.y))", ["run", "<$((2 ** 70))>", "<x>"]),
    ],
)
def test_what_only_a_shell_knows_stays_open(text, expected):
    assert words_of(text) == expected


def test_the_environment_is_what_it_is_told():
    assert words_of("X=${X:-1}; Y=2; run $X $1 $Y", **{"X": "5", "1": "a", "Y": "3"}) == ["run", "5", "a", "3"]


def test_nothing_runs(tmp_path):
    marker = tmp_path / "ran"
    text = f"X=$(touch {marker}); Y=`touch {marker}`; touch {marker}; Z=$((__import__('os').mkdir('{marker}'))); run $Z"
    read_script(text, {})
    assert not marker.exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("for i in 1 2; do A+=(--x $i); done", "line 1: what begins with 'for'"),
        ("\nf() {\n  A=1\n}\nrun", "line 2: what begins with 'f'"),
        ("\nsource env.sh", "line 2: env.sh"),
        ('if [ -n "$KEY" ]; then A=1; fi', "KEY"),
        ("\nif grep -q x file; then A=(--x); fi", "line 2: a condition"),
    ],
)
def test_what_is_not_read_is_told(text, told):
    assert told in " ".join(read_script(text, {}).notes)


@pytest.mark.parametrize(
    "text",
    ["'", '"', "${", "$(", "`", "A=(", "if", "if [", "case", "case x in", "a\\", "$((", "((((", "fi", ";;", "A=(a\n#"],
)
def test_half_a_script_ends(text):
    read_script(text * 3, {})


def test_a_long_script_takes_a_moment():
    text = "A=(" + "--x 1 " * 20_000 + ")\n" + "run ${A[@]}\n"
    assert len(words_of(text)) == 40_001
