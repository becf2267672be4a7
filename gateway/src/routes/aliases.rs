//! The names that ModelRoutes give, with an index: each request looks for its name several times, and there may be thousands.

use std::collections::HashMap;
use std::ops::Deref;

use super::ModelAlias;

/// Names of ModelRoutes, in the order of their routes.
#[derive(Clone, Debug, Default)]
pub struct Aliases {
    list: Vec<ModelAlias>,
    /// Where names that are no patterns are in the list.
    exact: HashMap<String, Vec<usize>>,
    /// Where patterns are.
    patterns: Vec<usize>,
}

impl Aliases {
    /// Those that have this name, alone or after their namespace.
    pub(super) fn claiming(&self, model: &str) -> Vec<&ModelAlias> {
        let qualified = model.split_once('/').map(|(_, name)| name);
        let named = [Some(model), qualified].into_iter().flatten();
        let exact = named.filter_map(|name| self.exact.get(name)).flatten();
        let mut places: Vec<usize> = exact.chain(&self.patterns).copied().collect();
        places.sort_unstable();
        places.dedup();
        let all = places.into_iter().filter_map(|place| self.list.get(place));
        all.filter(|alias| alias.claims(model)).collect()
    }
}

impl From<Vec<ModelAlias>> for Aliases {
    fn from(list: Vec<ModelAlias>) -> Self {
        let mut exact: HashMap<String, Vec<usize>> = HashMap::new();
        let mut patterns = Vec::new();
        for (place, alias) in list.iter().enumerate() {
            match alias.is_exact() {
                true => exact.entry(alias.pattern.clone()).or_default().push(place),
                false => patterns.push(place),
            }
        }
        Self { list, exact, patterns }
    }
}

impl FromIterator<ModelAlias> for Aliases {
    fn from_iter<I: IntoIterator<Item = ModelAlias>>(aliases: I) -> Self {
        Self::from(aliases.into_iter().collect::<Vec<_>>())
    }
}

impl IntoIterator for Aliases {
    type Item = ModelAlias;
    type IntoIter = std::vec::IntoIter<ModelAlias>;

    fn into_iter(self) -> Self::IntoIter {
        self.list.into_iter()
    }
}

impl Deref for Aliases {
    type Target = [ModelAlias];

    fn deref(&self) -> &[ModelAlias] {
        &self.list
    }
}

impl PartialEq for Aliases {
    fn eq(&self, other: &Self) -> bool {
        self.list == other.list
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use rand::Rng as _;

    use super::super::{ModelScope, RoutePolicy, RoutingTable};
    use super::*;

    fn alias(pattern: String, namespace: &str, number: usize) -> ModelAlias {
        ModelAlias {
            pattern,
            route: format!("{namespace}/r{number}"),
            namespace: namespace.into(),
            policy: Arc::new(RoutePolicy::default()),
            cache_ttl: None,
        }
    }

    #[test]
    fn the_index_finds_what_a_look_at_every_name_finds() {
        let random = &mut rand::rng();
        let parts = ["a", "b", "ab", "*", "a*", "*b", "/", "default/a", "x/b", "a*b"];
        let word = |random: &mut rand::rngs::ThreadRng, most: usize| -> String {
            (0..random.random_range(1..=most)).map(|_| parts[random.random_range(0..parts.len())]).collect()
        };
        for _ in 0..300 {
            let list: Vec<ModelAlias> = (0..20)
                .map(|number| {
                    let namespace = ["default", "x", "a"][random.random_range(0..3)];
                    alias(word(random, 2), namespace, number)
                })
                .collect();
            let aliases = Aliases::from(list.clone());
            for _ in 0..20 {
                let model = word(random, 3);
                let expected: Vec<&ModelAlias> = list.iter().filter(|alias| alias.claims(&model)).collect();
                assert_eq!(aliases.claiming(&model), expected, "{model}");
            }
        }
    }

    #[test]
    fn ten_thousand_routes_are_looked_up_and_listed() {
        let aliases = (0..10_000).map(|number| alias(format!("model-{number}"), "default", number)).collect();
        let table = RoutingTable { synced: true, aliases, ..RoutingTable::default() };
        let started = Instant::now();
        for number in 0..10_000 {
            let found = table.matching_alias(&format!("model-{number}"), &ModelScope::ALL).unwrap();
            assert_eq!(found.route, format!("default/r{number}"));
        }
        println!("{:?} a name", started.elapsed() / 10_000);
        let started = Instant::now();
        assert!(table.models(&ModelScope::ALL).is_empty(), "none of them leads anywhere");
        println!("{:?} a list", started.elapsed());
    }
}
