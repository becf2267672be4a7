//! Copy plans: expected results on small clusters, and invariants on random ones.

use super::*;
use crate::test_rng::TestRng;

const MINUTE: i64 = 60;

fn key(name: &str) -> ObjectKey {
    ("ns".to_owned(), name.to_owned())
}

/// A cluster as text: `a:100` is a node and its limit, `m=30` a model and its bytes.
fn stock(nodes: &str, models: &str) -> Inventory {
    let pairs = |text: &str, sign: char| -> Vec<(String, u64)> {
        let words = text.split_ascii_whitespace().map(|word| word.split_once(sign).unwrap());
        words.map(|(name, number)| (name.to_owned(), number.parse().unwrap())).collect()
    };
    let disk = |limit| NodeStorage { limit: Some(limit), availability: Availability::Open };
    let model = |name: &str, bytes| ModelFiles { files: name.to_owned(), bytes, ..ModelFiles::default() };
    Inventory {
        nodes: pairs(nodes, ':').into_iter().map(|(name, limit)| (name, disk(limit))).collect(),
        models: pairs(models, '=')
            .into_iter()
            .map(|(name, bytes)| (key(&name), model(&name, bytes)))
            .collect(),
        ..Inventory::default()
    }
}

impl Inventory {
    fn model(mut self, name: &str, change: impl FnOnce(&mut ModelFiles)) -> Self {
        change(self.models.get_mut(&key(name)).unwrap());
        self
    }

    fn preload(self, name: &str, least: Option<u32>) -> Self {
        self.model(name, |model| {
            model.preload = Some(PreloadRule { min_nodes: least, ..PreloadRule::default() })
        })
    }

    fn node(mut self, name: &str, availability: Availability) -> Self {
        self.nodes.get_mut(name).unwrap().availability = availability;
        self
    }

    /// `m@a` is complete and was used at that minute; `m@a/7` has seven bytes so far.
    fn copy(mut self, copy: &str, minute: i64) -> Self {
        let (name, rest) = copy.split_once('@').unwrap();
        let (node, done) = rest.split_once('/').map_or((rest, None), |(node, done)| (node, Some(done)));
        let bytes = self.models.get(&key(name)).map_or(0, |model| model.bytes);
        self.copies.push(NodeCopy {
            model: key(name),
            node: node.to_owned(),
            bytes,
            done: done.map_or(bytes, |done| done.parse().unwrap()),
            ready: done.is_none(),
            last_used: Some(Timestamp::from_second(minute * MINUTE).unwrap()),
            pinned: false,
        });
        self
    }

    fn used(mut self, name: &str, node: &str) -> Self {
        self.uses.insert((key(name), node.to_owned()));
        self
    }

    /// The cluster with a plan applied, before a byte of it was fetched.
    fn after(&self, plan: &CopyPlan) -> Self {
        let mut after = self.clone();
        after.copies.retain(|copy| {
            !plan.remove.iter().any(|gone| gone.model == copy.model && gone.node == copy.node)
        });
        after.copies.extend(plan.create.iter().map(|(model, node)| NodeCopy {
            model: model.clone(),
            node: node.clone(),
            ..NodeCopy::default()
        }));
        after
    }

    /// The same once all reserved files were fetched.
    fn settled(&self, plan: &CopyPlan) -> Self {
        let mut after = self.after(plan);
        for copy in &mut after.copies {
            let promised = plan
                .preloads
                .get(&copy.model)
                .is_some_and(|preload| preload.holders.contains_key(&copy.node));
            if promised && !copy.ready {
                let bytes = after.models[&copy.model].bytes;
                (copy.bytes, copy.done, copy.ready) = (bytes, bytes, true);
            }
        }
        after
    }
}

fn words(plan: &CopyPlan) -> String {
    let mut words: Vec<String> =
        plan.create.iter().map(|((_, model), node)| format!("+{model}@{node}")).collect();
    words.extend(plan.remove.iter().map(|gone| format!("-{}@{}", gone.model.1, gone.node)));
    words.join(" ")
}

#[test]
fn every_story_of_copies_ends_as_its_owner_expects() {
    let two = || stock("a:100 b:90", "m=40 old=50 hot=30");
    let pool = |nodes: &[&str]| {
        let nodes = nodes.iter().map(|node| (*node).to_owned()).collect();
        move |model: &mut ModelFiles| {
            model.preload = Some(PreloadRule { nodes: Some(Arc::new(nodes)), ..PreloadRule::default() });
        }
    };
    let pinned = |model: &mut ModelFiles| {
        model.preload = Some(PreloadRule { min_nodes: Some(1), pinned: true, ..PreloadRule::default() });
    };
    let important = |model: &mut ModelFiles| model.priority = 9;
    let shared = |model: &mut ModelFiles| model.files = "old".to_owned();
    for (story, inventory, expected) in [
        ("nothing is wanted", two().copy("old@a", 1), ""),
        ("every node of no pool is every node", two().preload("m", None), "+m@a +m@b"),
        ("of a pool only", two().model("m", pool(&["b"])), "+m@b"),
        ("one copy goes where most is free", two().preload("m", Some(1)), "+m@a"),
        ("not where it is full", two().preload("m", Some(1)).copy("old@a", 1).copy("hot@a", 1), "+m@b"),
        (
            "where its deployments may run, even if something must go",
            two()
                .preload("m", Some(1))
                .copy("old@b", 1)
                .copy("hot@b", 2)
                .model("m", |model| model.runs_on = ["b".to_owned()].into()),
            "+m@b -old@b",
        ),
        (
            "where some of it is already, by another Model of the same source",
            two()
                .copy("old@b", 1)
                .model("m", shared)
                .model("m", |model| model.bytes = 50)
                .preload("m", Some(1)),
            "+m@b",
        ),
        ("what is there is enough", two().preload("m", Some(1)).copy("m@b", 1), ""),
        ("what is on its way is enough", two().preload("m", Some(1)).copy("m@b/7", 1), ""),
        ("one more is needed", two().preload("m", Some(2)).copy("m@b/7", 1), "+m@a"),
        ("a closed node gets nothing", two().preload("m", None).node("a", Availability::Cordoned), "+m@b"),
        (
            "and counts for what it holds",
            two().preload("m", Some(1)).copy("m@a", 1).node("a", Availability::Cordoned),
            "",
        ),
        (
            "unless it is lost",
            two().preload("m", Some(1)).copy("m@a", 1).node("a", Availability::Lost),
            "+m@b",
        ),
        (
            "the least recently used goes",
            two().preload("m", None).copy("old@a", 5).copy("hot@a", 2).copy("old@b", 5).copy("hot@b", 2),
            "+m@a +m@b -hot@a -hot@b",
        ),
        (
            "after those of less priority",
            two()
                .preload("m", Some(1))
                .model("hot", important)
                .copy("old@a", 5)
                .copy("hot@a", 2)
                .node("b", Availability::Draining),
            "+m@a -old@a",
        ),
        (
            "one that is large enough alone goes alone",
            stock("a:100", "m=60 x=10 y=80").preload("m", None).copy("x@a", 1).copy("y@a", 2),
            "+m@a -y@a",
        ),
        (
            "what a replica reads stays, and nothing is removed in vain",
            two()
                .preload("m", None)
                .copy("old@a", 1)
                .copy("hot@a", 2)
                .used("hot", "a")
                .used("old", "a")
                .copy("old@b", 1)
                .copy("hot@b", 1)
                .used("old", "b")
                .model("m", |model| model.bytes = 45),
            "",
        ),
        (
            "what is pinned stays, wherever it is",
            two()
                .preload("m", None)
                .model("old", pinned)
                .copy("old@a", 1)
                .copy("old@b", 1)
                .copy("hot@a", 2)
                .copy("hot@b", 2),
            "+m@a +m@b -hot@a -hot@b",
        ),
        (
            "what must always be on one node may go from the other",
            two()
                .preload("old", Some(1))
                .preload("m", None)
                .copy("old@a", 1)
                .copy("old@b", 1)
                .copy("hot@a", 3)
                .copy("hot@b", 3)
                .model("hot", important),
            "+m@a +m@b -hot@a -old@b",
        ),
        (
            "a replica's files push out what nobody needs",
            two().copy("old@a", 1).copy("hot@a", 2).copy("m@a/0", 3).used("m", "a"),
            "-old@a",
        ),
        (
            "files of two Models that are the same go together",
            stock("a:100", "m=60 old=50 twin=50")
                .model("twin", shared)
                .preload("m", None)
                .copy("old@a", 1)
                .copy("twin@a", 2),
            "+m@a -old@a -twin@a",
        ),
        (
            "or not at all",
            stock("a:100", "m=60 old=50 twin=50")
                .model("twin", shared)
                .preload("m", None)
                .copy("old@a", 1)
                .copy("twin@a", 2)
                .used("twin", "a"),
            "",
        ),
        ("what nobody knows stays", stock("a:100", "m=60").preload("m", None).copy("stranger@a", 1), "+m@a"),
    ] {
        let plan = plan(&inventory);
        assert_eq!(words(&plan), expected, "{story}");
        assert_eq!(words(&super::plan(&inventory.after(&plan))), "", "{story}: again");
        assert_eq!(words(&super::plan(&inventory.settled(&plan))), "", "{story}: once all has come");
    }
}

#[test]
fn disk_shortages_give_numbers_and_remedy() {
    let lacks = |inventory: &Inventory| {
        let plan = plan(inventory);
        let lacks: Vec<String> = plan.preloads[&key("m")].shortages.iter().map(ToString::to_string).collect();
        (plan.preloads[&key("m")].desired_nodes, words(&plan), lacks.join("; "))
    };
    let full = stock("a:100 b:90", "m=80 old=50 hot=30").preload("m", None).copy("old@a", 1).copy("hot@a", 1);
    let (expected, done, said) = lacks(&full.used("old", "a"));
    assert_eq!((expected, done.as_str()), (2, "+m@b"));
    assert!(said.starts_with("node a: 80 B more are needed, 20 B are free beyond the reserve and 30 B could go, of 100 B that models may take"), "{said}");
    assert!(said.contains("spec.disk.reserve"), "{said}");
    let (expected, done, said) = lacks(&stock("a:100 b:90", "m=80").preload("m", Some(3)));
    assert_eq!((expected, done.as_str()), (3, "+m@a +m@b"));
    assert!(said.contains("3 nodes are wanted, and 2 of the pool take work"), "{said}");
    let mut unmeasured = stock("a:100", "m=80").preload("m", None);
    unmeasured.nodes.get_mut("a").unwrap().limit = None;
    assert!(lacks(&unmeasured).2.contains("has not reported its disk"));
}

/// A random cluster.
fn random(seed: u64) -> Inventory {
    let mut chance = TestRng(seed);
    let mut inventory = Inventory::default();
    let (nodes, models) = (1 + chance.below(5), 1 + chance.below(7));
    for index in 0..nodes {
        let availability = match chance.below(10) {
            0 => Availability::Cordoned,
            1 => Availability::Unreachable,
            2 => Availability::Lost,
            3 => Availability::Draining,
            _ => Availability::Open,
        };
        let limit = (chance.below(12) > 0).then(|| chance.below(200));
        inventory.nodes.insert(format!("n{index}"), NodeStorage { limit, availability });
    }
    for index in 0..models {
        let preload = (chance.below(2) == 0).then(|| PreloadRule {
            nodes: (chance.below(3) == 0).then(|| {
                Arc::new((0..nodes).filter(|_| chance.below(2) == 0).map(|node| format!("n{node}")).collect())
            }),
            min_nodes: (chance.below(2) == 0).then(|| 1 + chance.below(3) as u32),
            pinned: chance.below(4) == 0,
        });
        // Every fifth model shares the bytes of the first.
        let twin = index > 0 && chance.below(5) == 0;
        let bytes = if twin { inventory.models[&key("m0")].bytes } else { chance.below(90) };
        let model = ModelFiles {
            files: format!("f{}", if twin { 0 } else { index }),
            bytes,
            priority: chance.below(3) as i32,
            preload,
            runs_on: (0..nodes).filter(|_| chance.below(3) == 0).map(|node| format!("n{node}")).collect(),
        };
        inventory.models.insert(key(&format!("m{index}")), model);
    }
    for ((name, model), node) in
        inventory.models.clone().iter().flat_map(|model| (0..nodes).map(move |node| (model, node)))
    {
        let node = format!("n{node}");
        if chance.below(3) == 0 {
            let ready = chance.below(3) > 0;
            // Models of one source have the same bytes; a copy's bytes are those of its node.
            let twins = inventory.copies.iter().find(|copy: &&NodeCopy| {
                copy.node == node && inventory.models[&copy.model].files == model.files
            });
            let (done, ready) = match twins {
                Some(twin) => (twin.done, twin.ready),
                None if ready => (model.bytes, true),
                None => (chance.below(model.bytes + 1), false),
            };
            inventory.copies.push(NodeCopy {
                model: name.clone(),
                node: node.clone(),
                bytes: if chance.below(4) == 0 && !ready { 0 } else { model.bytes },
                done,
                ready,
                last_used: (chance.below(4) > 0)
                    .then(|| Timestamp::from_second(chance.below(50) as i64).unwrap()),
                pinned: chance.below(9) == 0,
            });
        }
        if chance.below(8) == 0 {
            inventory.uses.insert((name.clone(), node));
        }
    }
    inventory
}

/// Bytes on a node once all pending and complete files are present.
fn taken(inventory: &Inventory, plan: &CopyPlan, node: &str) -> u64 {
    let mut files: BTreeMap<&str, u64> = BTreeMap::new();
    for copy in inventory.copies.iter().filter(|copy| copy.node == node) {
        let model = &inventory.models[&copy.model];
        let promised = plan.preloads.get(&copy.model).is_some_and(|it| it.holders.contains_key(node));
        let bytes = if promised || copy.ready { model.bytes } else { copy.done };
        let sum = files.entry(&model.files).or_default();
        *sum = bytes.max(*sum);
    }
    files.values().sum()
}

#[test]
fn ten_thousand_random_clusters_keep_every_promise() {
    let (mut created, mut removed, mut short) = (0, 0, 0);
    for seed in 0..10_000 {
        let inventory = random(seed);
        let plan = plan(&inventory);
        let after = inventory.after(&plan);
        created += plan.create.len();
        removed += plan.remove.len();
        short += plan.preloads.values().filter(|preloaded| !preloaded.shortages.is_empty()).count();

        // Planning again changes nothing, neither at once nor when all files are present.
        for later in [&after, &inventory.settled(&plan)] {
            let again = super::plan(later);
            assert_eq!(words(&again), "", "seed {seed}");
        }
        // Where new files are fetched, the reserve is kept.
        for (_, node) in &plan.create {
            let limit = inventory.nodes[node].limit.unwrap_or(0);
            let shared = plan.create.iter().filter(|(_, other)| other == node).all(|(model, _)| {
                let files = &inventory.models[model].files;
                inventory.copies.iter().any(|copy| {
                    copy.node == *node && copy.ready && inventory.models[&copy.model].files == *files
                })
            });
            assert!(shared || taken(&after, &plan, node) <= limit, "seed {seed}: {node} is too full");
        }
        for gone in &plan.remove {
            let stay = |copy: &&NodeCopy| copy.model == gone.model && copy.node == gone.node;
            let copy = inventory.copies.iter().find(stay).unwrap();
            let model = &inventory.models[&gone.model];
            let pinned = copy.pinned || model.preload.as_ref().is_some_and(|preload| preload.pinned);
            assert!(!pinned, "seed {seed}: a pinned copy went");
            let reads = |(other, node): &(ObjectKey, String)| {
                *node == gone.node && inventory.models[other].files == model.files
            };
            assert!(!inventory.uses.iter().any(reads), "seed {seed}: files of a replica went");
            assert!(!gone.beneficiaries.is_empty(), "seed {seed}: nobody needs the room");
        }
        // Never below the requested number.
        for (name, model) in &inventory.models {
            let Some(preload) = &model.preload else { continue };
            let counts = |copy: &&NodeCopy| {
                let disk = inventory.nodes[&copy.node];
                copy.model == *name
                    && copy.ready
                    && preload.allows(&copy.node)
                    && !matches!(disk.availability, Availability::Lost | Availability::Draining)
            };
            let before = inventory.copies.iter().filter(counts).count();
            let least = preload.min_nodes.map_or(usize::MAX, |least| least as usize);
            let left = after.copies.iter().filter(counts).count();
            assert!(left >= before.min(least), "seed {seed}: {name:?} has {left} of {before}");
        }
        // No eviction was unnecessary: the others of its node together need its space.
        for gone in &plan.remove {
            let limit = inventory.nodes[&gone.node].limit.unwrap();
            let rooms = disk_budgets(&after);
            let mut needed = rooms[&gone.node].clone();
            let held =
                plan.preloads.iter().filter(|(_, preloaded)| preloaded.holders.contains_key(&gone.node));
            let held: Vec<&ObjectKey> = held.map(|(model, _)| model).collect();
            for model in held.iter().filter(|model| plan.preloads[**model].holders[&gone.node]) {
                needed.protect(&inventory.models[*model].files);
            }
            let mut uses: Vec<&ObjectKey> = inventory
                .uses
                .iter()
                .filter_map(|(model, node)| (*node == gone.node).then_some(model))
                .filter(|model| inventory.models[*model].bytes > 0)
                .collect();
            uses.sort_by_key(|model| (Reverse(inventory.models[*model].priority), *model));
            for model in uses.into_iter().chain(held) {
                needed
                    .reserve(&gone.node, model, &inventory.models[model].files, inventory.models[model].bytes)
                    .ok();
            }
            let free = needed.free();
            assert!(
                free < gone.bytes,
                "seed {seed}: {} of {limit} on {} went in vain, {free} are free",
                gone.bytes,
                gone.node
            );
        }
    }
    println!("{created} created, {removed} removed, {short} short");
    assert!(created > 1000 && removed > 300 && short > 1000, "{created} {removed} {short}");
}
