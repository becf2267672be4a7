//! The groups that can be compared with mlx-lm, as `variants.json` lists them, and which of them a run takes. It reads
//! no files and asks nobody.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use serde_json::{Map, Value};

/// Shares into which the groups are dealt; each run takes one.
const SHARES: usize = 90;

/// Most groups that a change has compared whole: many families at once are for the proof.
const MAX_WHOLE: usize = 3;

/// Most that it has compared in brief, beside those of every shape: where all depend on a change, each run takes others.
const MAX_BRIEF: usize = 5;

/// Parts of a path, and the topic whose groups a change there concerns. A family's name in a path concerns the family.
const TOPICS: &[(&str, &str)] = &[
    ("quant", "quantised"),
    ("linear", "quantised"),
    ("weights", "quantised"),
    ("weights", "stored"),
    ("weights", "members"),
    ("sdpa", "kv"),
    ("attention", "kv"),
    ("attention", "members"),
    ("cache", "kv"),
    ("sequence", "kv"),
    ("mlp", "members"),
    ("decoder", "members"),
    ("decoder", "pipeline"),
    ("tensors", "quantised"),
    ("tensors", "members"),
    ("src/index", "stored"),
    ("safetensors", "stored"),
    ("divisibility", "members"),
    ("tensor_parallel", "members"),
    ("tensor_parallel", "pipeline"),
    ("partition", "members"),
    ("partition", "pipeline"),
    ("distributed", "members"),
    ("distributed", "pipeline"),
    ("groups", "members"),
    ("groups", "pipeline"),
    ("model_runner", "pipeline"),
    ("adapter", "adapter"),
    ("linear", "adapter"),
    ("experts", "adapter"),
];
/// Where such a path lies.
const ENGINE: &[&str] = &["engine/src/", "engine/mlx/", "model/"];
/// What every group depends on: how mlx-lm is asked, how answers are compared, and MLX itself.
const EVERYTHING: &[&str] =
    &["engine/tests/oracle.py", "engine/tests/packings.py", "engine/tests/exactness/", "xtask/src/mlx.rs"];

/// Variants of small models, each with the groups it is tried on.
#[derive(Default)]
pub struct Matrix {
    shapes: Map<String, Value>,
    variants: Map<String, Value>,
}

impl Matrix {
    pub fn read(text: &str) -> Result<Self> {
        let mut all: Value = serde_json::from_str(text)?;
        let mut take = |name: &str| match all[name].take() {
            Value::Object(map) => Ok(map),
            _ => anyhow::bail!("there is no object {name:?}"),
        };
        Ok(Self { shapes: take("shapes")?, variants: take("variants")? })
    }

    /// What mlx-lm gets of a variant: all but the groups.
    pub fn spec(&self, variant: &str) -> Result<Value> {
        let of = self.variants.get(variant).with_context(|| format!("there is no variant {variant:?}"))?;
        let shape = of["shape"].as_str().unwrap_or_default();
        let mut config =
            self.shapes.get(shape).cloned().with_context(|| format!("{variant} has no shape"))?;
        let own = of["config"].as_object().into_iter().flatten();
        own.for_each(|(name, value)| config[name] = value.clone());
        let mut spec = of.clone();
        spec["config"] = config;
        if let Some(spec) = spec.as_object_mut() {
            ["shape", "splits", "stages"].iter().for_each(|name| drop(spec.remove(*name)));
        }
        Ok(spec)
    }

    /// Variants that another matrix lacks or has otherwise.
    pub fn differing(&self, former: &Self) -> BTreeSet<String> {
        let same = |name: &String| {
            former.variants.get(name) == self.variants.get(name)
                && former.spec(name).ok() == self.spec(name).ok()
        };
        self.variants.keys().filter(|name| !same(name)).cloned().collect()
    }

    /// Every group, ordered so that neighbours cost about the same.
    pub fn cases(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        for (name, variant) in &self.variants {
            let mut add = |splits: &Value, members| {
                for split in splits.as_array().into_iter().flatten() {
                    let split: Vec<u64> =
                        split.as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
                    let mut case = Case::new(name, &split, members);
                    case.topics.extend(self.topics(name));
                    case.is_slow = variant["dtype"].is_string() && variant["widen"] != true;
                    cases.push(case);
                }
            };
            add(&variant["splits"], 1);
            for (members, splits) in variant["stages"].as_object().into_iter().flatten() {
                add(splits, members.parse().unwrap_or_default());
            }
        }
        cases.sort_by_key(|case| (case.members, case.split.len(), case.name()));
        cases
    }

    fn topics(&self, variant: &str) -> Vec<String> {
        let Ok(spec) = self.spec(variant) else { return Vec::new() };
        let mut topics = vec![spec["config"]["model_type"].as_str().unwrap_or_default().to_owned()];
        for (field, topic) in [
            ("quantise", "quantised"),
            ("adapter", "adapter"),
            ("convert", "quantised"),
            ("kv", "kv"),
            ("shards", "stored"),
            ("index", "stored"),
            ("widen", "stored"),
        ] {
            if !spec[field].is_null() {
                topics.push(topic.to_owned());
            }
        }
        topics
    }
}

/// One group on one variant.
#[derive(Clone, Debug)]
pub struct Case {
    pub variant: String,
    /// Layers of every stage.
    pub split: Vec<u64>,
    /// Members of every stage.
    pub members: u64,
    /// Whether some prompts and the beginnings of answers are enough.
    pub brief: bool,
    /// Whether it computes in 16 bits, which takes a CPU ten times as long: minutes for a whole comparison.
    is_slow: bool,
    /// What it says something about.
    topics: BTreeSet<String>,
}

impl Case {
    pub fn new(variant: &str, split: &[u64], members: u64) -> Self {
        let mut topics = BTreeSet::new();
        if split.len() > 1 {
            topics.insert("pipeline".to_owned());
        }
        if members > 1 {
            topics.insert("members".to_owned());
        }
        Self {
            variant: variant.to_owned(),
            split: split.to_vec(),
            members,
            brief: false,
            is_slow: false,
            topics,
        }
    }

    pub fn name(&self) -> String {
        let Self { variant, split, members, .. } = self;
        match members {
            1 => format!("{variant} on {split:?}"),
            _ => format!("{variant} on {split:?} by {members}"),
        }
    }

    /// Stages and members.
    fn shape(&self) -> (usize, u64) {
        (self.split.len(), self.members)
    }
}

/// The groups of a run, from the paths and variants that changed and the number that deals the rest:
///
/// - whole: those of an edited variant and of a family whose name is in a changed path, as many of them as a run bears,
///   and the share of this number; what is slow is whole only where its variant was edited;
/// - in brief: one of each other variant of these; one of every shape of group; of every variant that a changed path's topic concerns, one with it; and one of
///   every variant where what all depend on changed; as many of these as a run bears.
pub fn chosen(
    every: Vec<Case>,
    paths: &BTreeSet<String>,
    edited: &BTreeSet<String>,
    number: u32,
) -> Vec<Case> {
    let ours = |path: &&String| ENGINE.iter().any(|folder| path.starts_with(folder));
    let touched: Vec<&String> = paths.iter().filter(ours).collect();
    let concerned: BTreeSet<&str> = TOPICS
        .iter()
        .filter(|(part, _)| touched.iter().any(|path| path.contains(part)))
        .map(|(_, topic)| *topic)
        .collect();
    let everything = paths.iter().any(|path| EVERYTHING.iter().any(|other| path.starts_with(other)));
    // Names of families are topics that are no kind of group.
    let family = |case: &Case| {
        let families = case.topics.iter().filter(|topic| !TOPICS.iter().any(|(_, other)| other == topic));
        families.into_iter().any(|family| touched.iter().any(|path| path.contains(family.as_str())))
    };
    let (mut shapes, mut seen) = (BTreeSet::new(), BTreeSet::new());
    let (mut taken, mut more) = (Vec::new(), Vec::new());
    let is_due = |case: &Case| edited.contains(&case.variant) || family(case);
    let stride = every.iter().filter(|case| is_due(case)).count().div_ceil(MAX_WHOLE).max(1);
    let mut due = 0;
    for (place, mut case) in every.into_iter().enumerate() {
        let mut whole = place % SHARES == number as usize % SHARES;
        let of_shape = shapes.insert(case.shape());
        let mut brief = false;
        if is_due(&case) {
            whole |= due % stride == number as usize % stride;
            brief |= seen.insert((case.variant.clone(), "due"));
            due += 1;
        }
        let of_this = concerned.iter().filter(|topic| case.topics.contains(**topic));
        for topic in of_this.copied().chain(everything.then_some("any")) {
            brief |= seen.insert((case.variant.clone(), topic));
        }
        case.brief = !whole || case.is_slow && !edited.contains(&case.variant);
        if whole || of_shape {
            taken.push(case);
        } else if brief {
            more.push(case);
        }
    }
    let stride = more.len().div_ceil(MAX_BRIEF).max(1);
    taken.extend(more.into_iter().skip(number as usize % stride).step_by(stride));
    taken
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn matrix() -> Matrix {
        Matrix::read(include_str!("../../../engine/tests/exactness/variants.json"))
            .unwrap_or_else(|error| panic!("{error}"))
    }

    fn taken(paths: &[&str], edited: &[&str], number: u32) -> Vec<Case> {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        chosen(matrix().cases(), &owned(paths), &owned(edited), number)
    }

    #[test]
    fn numbers_deal_all_groups_and_each_run_has_every_shape() {
        let shapes = BTreeSet::from([(1, 1), (2, 1), (3, 1), (1, 2), (1, 4), (2, 2)]);
        let (mut whole, mut every) = (BTreeSet::new(), BTreeSet::new());
        for number in 0..SHARES as u32 {
            let taken = taken(&[], &[], number);
            assert_eq!(taken.iter().map(Case::shape).collect::<BTreeSet<_>>(), shapes, "{number}");
            assert!(taken.len() < 11, "{} groups", taken.len());
            whole.extend(taken.iter().filter(|case| !case.brief).map(Case::name));
            every.extend(taken.iter().map(Case::name));
        }
        let cases = matrix().cases();
        assert_eq!(every.len(), cases.len());
        assert_eq!(whole.len(), cases.iter().filter(|case| !case.is_slow).count());
        assert!((220..cases.len()).contains(&whole.len()), "{} groups", whole.len());
    }

    #[test]
    fn every_part_of_a_topic_is_in_the_path_of_a_source_file() {
        fn paths(folder: &Path, found: &mut Vec<String>) {
            for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
                match entry.path() {
                    path if path.is_dir() => paths(&path, found),
                    path => found.push(path.display().to_string()),
                }
            }
        }
        let (mut found, root) = (Vec::new(), crate::cargo::root());
        ENGINE.iter().for_each(|folder| paths(&root.join(folder), &mut found));
        // The folder of the checkout may have any name.
        let prefix = root.display().to_string();
        found.iter_mut().for_each(|path| *path = path.trim_start_matches(&prefix).to_owned());
        for (part, topic) in TOPICS {
            assert!(found.iter().any(|path| path.contains(part)), "{part} ({topic}) is in no path");
        }
        for path in EVERYTHING {
            assert!(crate::cargo::root().join(path).exists(), "{path} does not exist");
        }
    }

    #[test]
    fn a_change_takes_the_groups_that_it_concerns() {
        // Of many variants each run takes some, and runs of all numbers take every one.
        let count = |topic: &str, path: &str| {
            let runs: Vec<Vec<Case>> = (0..SHARES as u32).map(|number| taken(&[path], &[], number)).collect();
            for run in &runs {
                let brief = run.iter().filter(|case| case.brief).count();
                assert!(
                    brief <= MAX_BRIEF + 11 && run.len() - brief <= MAX_WHOLE + 7,
                    "{path}: {brief} of {}",
                    run.len()
                );
            }
            runs.iter()
                .flatten()
                .filter(|case| case.topics.contains(topic))
                .map(|case| &case.variant)
                .collect::<BTreeSet<_>>()
                .len()
        };
        let all = |topic: &str| {
            let cases = matrix().cases();
            let having = cases.iter().filter(|case| case.topics.contains(topic));
            having.map(|case| case.variant.clone()).collect::<BTreeSet<_>>().len()
        };
        for (path, topic) in [
            ("engine/src/layers/linear.rs", "quantised"),
            ("engine/src/cache/format.rs", "kv"),
            ("engine/src/layers/sdpa.rs", "kv"),
            ("engine/src/layers/tensor_parallel.rs", "members"),
            ("engine/src/runtime/model_runner.rs", "pipeline"),
            ("engine/src/partition.rs", "members"),
            ("engine/src/partition.rs", "pipeline"),
            ("engine/src/weights/shard_read.rs", "stored"),
            ("engine/src/decoder.rs", "pipeline"),
            ("model/src/tensors.rs", "quantised"),
            ("model/src/index.rs", "stored"),
            ("model/src/families/qwen3.rs", "qwen3"),
            ("model/src/families/llama.rs", "llama"),
            ("engine/tests/oracle.py", "quantised"),
        ] {
            assert!(crate::cargo::root().join(path).is_file(), "{path} is no file");
            assert!(all(topic) > 0, "{topic}");
            assert_eq!(count(topic, path), all(topic), "{path}: {topic}");
        }
        let names = |paths: &[&str]| taken(paths, &[], 0).iter().map(Case::name).collect::<Vec<_>>();
        assert_eq!(names(&["gateway/src/cache.rs"]), names(&[]));
    }

    #[test]
    fn an_edited_variant_and_a_family_are_taken_whole() {
        let former = include_str!("../../../engine/tests/exactness/variants.json");
        let edited = Matrix::read(&former.replace("\"shards\": 3", "\"shards\": 4")).unwrap_or_default();
        assert_eq!(matrix().differing(&edited), BTreeSet::from(["untied-biased".to_owned()]));
        assert_eq!(matrix().differing(&Matrix::default()).len(), matrix().variants.len());
        let whole = |taken: Vec<Case>, has: &dyn Fn(&Case) -> bool| {
            taken.iter().filter(|c| has(c) && !c.brief).count()
        };
        assert_eq!(
            whole(taken(&[], &["untied-biased"], 0), &|case| case.variant == "untied-biased"),
            MAX_WHOLE
        );
        let qwen3 = |case: &Case| case.topics.contains("qwen3");
        let all = matrix().cases().iter().filter(|case| qwen3(case)).count();
        assert!(whole(taken(&["model/src/families/qwen3.rs"], &[], 0), &qwen3) >= all.min(MAX_WHOLE / 2));
        // All variants at once: a few whole, others in brief, and all of them in some runs.
        let matrix = matrix();
        let every: Vec<&str> = matrix.variants.keys().map(String::as_str).collect();
        let mut variants = BTreeSet::new();
        for number in 0..SHARES as u32 {
            let taken = taken(&[], &every, number);
            assert!(taken.iter().filter(|case| !case.brief).count() <= MAX_WHOLE + 7, "{}", taken.len());
            assert!(taken.len() <= MAX_WHOLE + MAX_BRIEF + 13, "{}", taken.len());
            variants.extend(taken.into_iter().map(|case| case.variant));
        }
        assert_eq!(variants.len(), every.len());
    }
}
