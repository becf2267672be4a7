//! What the answers of providers cost.

use std::collections::BTreeMap;

use russet_crds::Money;

use super::record::OutsideAnswer;

/// What answers of providers cost, of a request whose responses have so many tokens; none where nobody knows one of the prices
/// and the provider does not say the cost. A provider takes the prompt of each of several responses. One that did not complete
/// cost its prompt and what came of it.
pub(super) fn cost(outside: &BTreeMap<u32, OutsideAnswer>, completion_tokens: u64) -> Option<Money> {
    let complete = outside.values().filter_map(|answer| answer.usage);
    let complete: u64 = complete.map(|usage| u64::from(usage.completion_tokens)).sum();
    let mut rest = completion_tokens.saturating_sub(complete);
    let costs = outside.values().map(|answer| {
        let Some(price) = answer.price else { return answer.reported_cost };
        Some(match answer.usage {
            Some(usage) => {
                let [prompt, cached, completion] =
                    [usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens].map(u64::from);
                price.of(prompt, cached, completion)
            }
            None => price.of(answer.prompt_tokens, 0, std::mem::take(&mut rest)),
        })
    });
    let costs: Option<Vec<Money>> = costs.collect();
    costs.filter(|costs| !costs.is_empty()).map(|costs| costs.into_iter().fold(Money::ZERO, Money::plus))
}

#[cfg(test)]
mod tests {
    use russet_crds::{ModelPrice, TokenPrice};
    use russet_wire::event::Usage;

    use super::*;

    #[test]
    fn a_request_costs_what_each_of_its_responses_does() {
        let money = |text: &str| text.parse::<Money>().unwrap();
        let tokens = TokenPrice { input: money("1"), cached_input: None, output: money("10") };
        let price = ModelPrice { tokens, request: money("0.25") };
        let answer = |price, completion: Option<u32>| {
            let usage =
                |completion_tokens| Usage { prompt_tokens: 1_000_000, completion_tokens, cached_tokens: 0 };
            let usage = completion.map(usage);
            OutsideAnswer {
                provider: "p".into(),
                price,
                prompt_tokens: 2_000_000,
                reported_cost: None,
                usage,
            }
        };
        let says = |cost, answer| OutsideAnswer { reported_cost: Some(money(cost)), ..answer };
        let (some, known) = (Some(100_000), Some(price));
        for (answers, completion_tokens, expected) in [
            (vec![], 5, None),
            (vec![answer(known, some)], 100_000, Some("2.25")),
            // Each response has its prompt, and one that did not complete its estimated one and what came of it.
            (vec![answer(known, some), answer(known, some)], 200_000, Some("4.5")),
            (vec![answer(known, some), answer(known, None)], 150_000, Some("5")),
            (vec![answer(known, None)], 0, Some("2.25")),
            (vec![answer(known, some), answer(None, some)], 200_000, None),
            // What a provider says counts where nobody knows its price.
            (vec![says("0.5", answer(None, some))], 100_000, Some("0.5")),
            (vec![says("0.5", answer(known, some))], 100_000, Some("2.25")),
            (vec![says("0.5", answer(None, some)), answer(known, some)], 200_000, Some("2.75")),
        ] {
            let outside = (0..).zip(answers).collect();
            assert_eq!(cost(&outside, completion_tokens), expected.map(money), "{outside:?}");
        }
    }
}
