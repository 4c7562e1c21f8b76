"""Recipes as YAML, ``--set`` overrides, and every error at once in the user's spelling."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any, cast, get_args

import yaml
from pydantic import BaseModel, ValidationError

from onetake.core.axes import Axis
from onetake.core.records import nearest
from onetake.language.recipe import LanguageRecipe
from onetake.report.text import flatten
from onetake.run.recipe import Recipe


class RecipeError(ValueError):
    """One or more problems of a recipe; the message has one a line."""


def recipe_names() -> list[str]:
    """Recipes that come with the package."""
    files = resources.files("onetake").joinpath("recipes").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """The text of a recipe: a YAML file, or one that comes with the package. Raises RecipeError if there is neither."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise RecipeError(f"there is no recipe file {path}")
        return path.read_text()
    if name not in recipe_names():
        raise RecipeError(f"there is no recipe {name!r}{nearest(name, recipe_names())}; `onetake recipes` lists them")
    return resources.files("onetake").joinpath("recipes", f"{name}.yaml").read_text()


def is_language(text: str) -> bool:
    """Whether the recipe is a language model's, whatever else may be wrong with it."""
    return "kind" in _tree(text)


def load(text: str, overrides: list[str] | None = None, ranks: int | None = 1) -> Recipe:
    """Parse, override and check a diffusion recipe for `ranks` processes; None takes the fewest it can run on, to read an earlier
    run's.

    Raises RecipeError that lists everything wrong with it.
    """
    if not is_language(text):
        recipe = load_any(text, overrides, ranks)
        if isinstance(recipe, Recipe):
            return recipe
    raise RecipeError(
        "kind: language trains a language model, and this command is for recipes of diffusion models; `onetake train`, `plan`, "
        "`verify` and `report` take it, and peft loads a run's weights/"
    )


def load_any(text: str, overrides: list[str] | None = None, ranks: int | None = 1) -> Recipe | LanguageRecipe:
    """The same for a recipe of either kind: ``kind: language`` says the second."""
    tree = _tree(text)
    problems = [problem for override in overrides or [] if (problem := _override(tree, override))]
    kind: type[Recipe] | type[LanguageRecipe] = LanguageRecipe if "kind" in tree else Recipe
    try:
        recipe = kind.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(
            "\n".join([*problems, *(_explain(kind, detail, tree) for detail in error.errors())])
        ) from error
    fewest = recipe.parallel.over(1) if isinstance(recipe, Recipe) else 1
    problems += recipe.problems(fewest if ranks is None else ranks)
    if problems:
        raise RecipeError("\n".join(problems))
    return recipe


def _tree(text: str) -> dict[str, Any]:
    """The recipe's mapping, laid over the recipe that its ``extends`` names, if it names one."""
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"the recipe is not YAML: {error}") from error
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise RecipeError("the recipe must be a mapping of keys to values")
    base = tree.pop("extends", None)
    return tree if base is None else _laid_over(_tree(recipe_text(str(base))), tree)


def _laid_over(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Groups of keys are merged; a value, or a choice of another kind, replaces what was there."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and value.get("kind") in (None, old.get("kind")):
            merged[key] = _laid_over(old, value)
        else:
            merged[key] = value
    return merged


def dump(recipe: BaseModel) -> str:
    """The resolved recipe as YAML; `load` reads it back to an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def changes(old: Recipe | LanguageRecipe, new: Recipe | LanguageRecipe) -> list[str]:
    """``key: old → new`` for every value that differs, but for those that may: `updates` (grow), `out`, `parallel`."""
    before, after = flatten(old.model_dump(mode="json")), flatten(new.model_dump(mode="json"))
    keys = [
        k for k in before | after if before.get(k) != after.get(k) and k not in ("updates", "out", "parallel.shard")
    ]
    found = [f"{key}: {before.get(key)} → {after.get(key)}" for key in keys]
    if new.updates < old.updates:
        found.append(f"updates: {old.updates} → {new.updates} (may grow, not shrink)")
    return found


def _override(tree: dict[str, Any], override: str) -> str | None:
    """Put ``a.b=value`` into the tree; the value is YAML. Returns what is wrong with it, if anything is."""
    path, equals, value = override.partition("=")
    if not equals or not path.strip():
        return f"--set {override}: write key=value"
    *parents, key = path.strip().split(".")
    node: dict[str, Any] = tree
    for parent in parents:
        child = {} if node.get(parent) is None else node[parent]
        if isinstance(child, str):  # a choice written by its name alone
            child = {"kind": child}
        if not isinstance(child, dict):
            return f"--set {override}: {parent} holds a value, not a group of keys"
        node[parent] = child
        node = child
    try:
        node[key] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        return f"--set {override}: the value is not YAML ({' '.join(str(error).split())})"
    return None


def _explain(kind: type[BaseModel], detail: Any, tree: dict[str, Any]) -> str:
    """One validation error in the recipe's spelling."""
    where = [str(part) for part in detail["loc"]]
    keys, model = _walk(kind, where, tree)
    path = ".".join(keys)
    if detail["type"] == "axis":
        return f"{path}: {detail['msg']}"
    if detail["type"] == "extra_forbidden":
        known = list(model.model_fields) if model is not None else []
        return f"{path}: is not a key of the recipe{nearest(keys[-1], known)}"
    if detail["type"] == "union_tag_invalid":
        return f"{path}: {detail['ctx']['tag']!r} is none of {detail['ctx']['expected_tags']}"
    if detail["type"] == "union_tag_not_found":
        return f"{path}: needs a kind (write {path}: NAME, or {path}.kind=NAME)"
    return f"{path}: {detail['msg']} (got {detail['input']!r})"


def _walk(kind: type[BaseModel], where: list[str], tree: Any) -> tuple[list[str], type[BaseModel] | None]:
    """Follow a pydantic location through the models; drops the union tags it contains. Returns keys and the last one's model."""
    model: type[BaseModel] | None = kind
    choices: dict[str, type[BaseModel]] = {}
    keys = []
    for part in where:
        if part in choices:
            model, choices = choices[part], {}
            continue
        keys.append(part)
        tree = tree.get(part) if isinstance(tree, dict) else None
        if model is not None and part in model.model_fields and part is not where[-1]:
            field = model.model_fields[part]
            axes = [axis for axis in field.metadata if isinstance(axis, Axis)]
            models = [axis.chosen(tree, cast(type, field.annotation)) for axis in axes] or _models(field.annotation)
            choices = {str(m.model_fields["kind"].default): m for m in models if "kind" in m.model_fields}
            model, choices = (models[0], {}) if len(models) == 1 else (model, choices)
    return keys, model


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]
