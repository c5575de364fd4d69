"""Checks the files of deploy/ by their own tools: `make check-deploy`.

The chart has the version of the package, which is set in `src/twolane/__init__.py` alone. Helm
lints and renders the chart (the program `helm`, or its library in helm-python-sdk), the result is
compared with deploy/kubernetes/, Kubernetes' schemas judge every manifest (kubeconform, or
kubernetes-validate), hadolint the container files, check-jsonschema and zizmor the workflows,
systemd-analyze the unit. A tool that is not there is named and skipped. `--write` writes the
version into the chart and makes deploy/kubernetes/ anew.
"""

import importlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

try:
    import yaml
except ImportError:
    print("skipped: everything (PyYAML is not installed)")
    sys.exit()

DEPLOY = Path(__file__).parent
CHART = DEPLOY / "helm/twolane"
HEAD = "# Made from deploy/helm/twolane/ci/{}-values.yaml by `python deploy/check.py --write`.\n"
FAILED: list[str] = []


class Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


def written(dumper: Dumper, text: str) -> yaml.ScalarNode:
    """Return a text as YAML."""
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Dumper.add_representer(str, written)


def report(what: str, problem: str | None) -> None:
    """Print the outcome of a check, and keep it if it failed."""
    print(f"{'ok' if not problem else 'FAILED'}: {what}" + (f"\n{problem}" if problem else ""))
    if problem:
        FAILED.append(what)


def ran(*command: str) -> tuple[str, str | None]:
    """Run a command; return its output, and again as the problem if it failed."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    text = ended.stdout + ended.stderr
    return ended.stdout, text if ended.returncode else None


def tool(name: str) -> str | None:
    """Return the path of a program beside this Python, or on the PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def library(name: str) -> Any:
    """Return a module, or None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def rendered(values: Path) -> str | None:
    """Lint and render the chart with these values; return its manifests."""
    what, settings = f"helm lint --strict, {values.name}", yaml.safe_load(values.read_text())
    if helm := tool("helm"):
        report(what, ran(helm, "lint", "--strict", str(CHART), "-f", str(values))[1])
        command = (helm, "template", "twolane", str(CHART), "-f", str(values), "-n", "default")
        text, problem = ran(*command)
        report(f"helm template, {values.name}", problem)
        documents = text
    elif helm_python := library("helm_python.chart"):
        found = helm_python.lint(str(CHART), settings, strict=True)
        wrong = [one for one in found["messages"] if one["severity"] > 1]
        problem = json.dumps([*wrong, *found["errors"]]) if wrong or found["errors"] else None
        report(what, problem)
        chart = helm_python.Chart.load(str(CHART))
        files = chart.render(settings, name="twolane", namespace="default")
        report(f"helm template, {values.name}", None)
        documents = "\n---\n".join(text for name, text in files.items() if name.endswith(".yaml"))
    else:
        print("skipped: helm (neither the program nor helm-python-sdk is installed)")
        return None
    found = [one for one in yaml.safe_load_all(documents) if one]
    found.sort(key=lambda one: (one["kind"], one["metadata"]["name"]))
    return "---\n".join(yaml.dump(one, Dumper=Dumper, sort_keys=False) for one in found)


def check_version(write: bool) -> None:
    """Compare the versions in the chart with the package's."""
    module, chart = DEPLOY.parent / "src/twolane/__init__.py", CHART / "Chart.yaml"
    found = re.search(r'^__version__ = "(.+)"$', module.read_text(), re.MULTILINE)
    assert found, f"{module} has no version"
    text = chart.read_text()
    wanted = re.sub(r"^(version|appVersion): .+$", rf"\1: {found[1]}", text, flags=re.MULTILINE)
    if write:
        chart.write_text(wanted)
    same = chart.read_text() == wanted
    report(f"Chart.yaml has version {found[1]}", None if same else "run with --write")


def check_chart(write: bool) -> None:
    """Compare deploy/kubernetes/ with what the chart gives."""
    for values in sorted(CHART.glob("ci/*-values.yaml")):
        name = values.name.removesuffix("-values.yaml")
        target, manifests = DEPLOY / f"kubernetes/{name}.yaml", rendered(values)
        if manifests is None:
            return
        text = HEAD.format(name) + manifests
        if write:
            target.write_text(text)
        same = target.exists() and target.read_text() == text
        report(f"{target.name} is what the chart gives", None if same else "run with --write")


def check_schemas() -> None:
    """Judge every manifest by Kubernetes' schemas, where a kind has one."""
    files = sorted([*DEPLOY.glob("kubernetes/*.yaml"), DEPLOY / "gateway/route.yaml"])
    if kubeconform := tool("kubeconform"):
        command = (kubeconform, "-strict", "-ignore-missing-schemas", "-summary")
        report("kubeconform", ran(*command, *map(str, files))[1])
        return
    print("skipped: kubeconform (it is not on the PATH)")
    judge = library("kubernetes_validate")
    if judge is None:
        print("skipped: kubernetes-validate (it is not installed)")
        return
    for file in files:
        for manifest in yaml.safe_load_all(file.read_text()):
            what = f"{file.name}: {manifest['kind']} by Kubernetes {judge.latest_version()}"
            if "." in manifest["apiVersion"] and ".k8s.io/" not in manifest["apiVersion"]:
                print(f"skipped: {what}: there is no schema of a custom resource")
                continue
            try:
                judge.validate(manifest, judge.latest_version(), strict=True)
            except judge.SchemaNotFoundError:
                print(f"skipped: {what}: there is no schema of a custom resource")
            except judge.ValidationError as error:
                report(what, str(error))
            else:
                report(what, None)


def check_containers() -> None:
    """Have hadolint read the container files."""
    hadolint = tool("hadolint")
    for file in sorted(DEPLOY.glob("container/Containerfile.*")):
        if hadolint is None:
            print(f"skipped: hadolint {file.name} (it is not installed)")
        else:
            report(f"hadolint {file.name}", ran(hadolint, str(file))[1])


def check_workflows() -> None:
    """Judge the workflows by their schema, and by zizmor's rules on their security."""
    folder = DEPLOY.parent / ".github/workflows"
    schema = ("--builtin-schema", "vendor.github-workflows")
    for name, words in (
        ("check-jsonschema", (*schema, *map(str, sorted(folder.glob("*.yml"))))),
        ("zizmor", ("--offline", "--quiet", "--min-severity", "medium", str(folder))),
    ):
        program = tool(name)
        if program is None:
            print(f"skipped: {name} (it is not installed)")
        else:
            report(f"{name} .github/workflows", ran(program, *words)[1])


def check_unit() -> None:
    """Have systemd read the unit; the program that it starts need not be there."""
    analyze = tool("systemd-analyze")
    if analyze is None:
        print("skipped: systemd-analyze (it is not on the PATH)")
        return
    unit = (DEPLOY / "systemd/twolane.service").read_text()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "twolane.service"
        copy.write_text(unit.replace("/opt/twolane/bin/twolane", sys.executable))
        ended = subprocess.run(
            (analyze, "verify", "--man=no", str(copy)), capture_output=True, text=True, check=False
        )
    mine = [line for line in ended.stderr.splitlines() if "twolane.service" in line]
    report("systemd-analyze verify twolane.service", "\n".join(mine) or None)


def main() -> int:
    """Check everything; return the exit code."""
    write = "--write" in sys.argv[1:]
    check_version(write)
    check_chart(write)
    check_schemas()
    check_containers()
    check_workflows()
    check_unit()
    print(f"{len(FAILED)} failed")
    return bool(FAILED)


if __name__ == "__main__":
    sys.exit(main())
