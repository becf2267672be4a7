//! Why a request gets nothing of a Budget, in words for its client.

use std::time::Duration;

use jiff::Timestamp;
use russet_crds::BudgetPeriod;

use super::amount::Thing;
use super::claim::Shortage;
use crate::duration::short_text;
use crate::error::{ErrorKind, GatewayError, RETRY_AFTER};

/// Why a request gets nothing of the Budget of this name.
#[derive(Debug)]
pub(super) enum BudgetRejection {
    /// It has too little left.
    Short { name: String, shortage: Box<Shortage> },
    /// It has a limit of a newer release.
    UnknownPeriod { name: String },
    /// The gateway cannot ask for more of it.
    Unavailable { name: String, cause: String },
}

impl BudgetRejection {
    /// Tokens that are left, where tokens are what is short.
    pub(super) fn tokens_left(&self) -> Option<u64> {
        let Self::Short { shortage, .. } = self else { return None };
        match **shortage {
            Shortage::Limit { thing: Thing::Tokens, limit, used, reserved, .. } => {
                Some(limit.minus(used).minus(reserved).tokens)
            }
            Shortage::Limit { .. } | Shortage::Clock(_) => None,
        }
    }

    /// The error for the client.
    pub(super) fn error(&self) -> GatewayError {
        match self {
            Self::Short { name, shortage } => short(name, shortage),
            Self::UnknownPeriod { name } => {
                let message = format!(
                    "Budget {name} has a limit per a length of time that this release does not know, so nothing is answered"
                );
                GatewayError::new(ErrorKind::ModelNotReady, message)
            }
            Self::Unavailable { name, cause } => {
                let message = format!("the gateway cannot ask for more of Budget {name}: {cause}");
                GatewayError::new(ErrorKind::ModelNotReady, message).retry_after(RETRY_AFTER)
            }
        }
    }
}

fn short(name: &str, shortage: &Shortage) -> GatewayError {
    match shortage {
        Shortage::Limit { window, thing, limit, used, reserved, need, is_held: _ } => {
            let left = limit.minus(*used).minus(*reserved);
            let until = Duration::try_from(window.end.duration_since(Timestamp::now())).unwrap_or_default();
            let needed = match thing {
                // Nobody knows before it is answered.
                Thing::Energy => String::new(),
                // It costs nothing so far, and more than all is used.
                _ if thing.of(*need) == 0 => String::new(),
                Thing::Requests | Thing::Tokens | Thing::Money => {
                    format!(", and this request may need {}", thing.shown(*need))
                }
            };
            let running = match thing.of(*reserved) {
                0 => String::new(),
                // A mark of each of them, of which there may be thousands.
                _ if *thing == Thing::Energy => String::new(),
                _ => format!(", {} are reserved by requests that run", thing.shown(*reserved)),
            };
            let message = format!(
                "Budget {name} allows {} {what} per {per}: {} are used{running}, {} are left{needed}; the next {per} begins in \
                 {}",
                thing.shown(*limit),
                thing.shown(*used),
                thing.shown(left),
                short_text(until),
                what = thing.as_str(),
                per = window.per.as_str(),
            );
            let is_soon_over = window.per == BudgetPeriod::Minute;
            let kind = if is_soon_over { ErrorKind::QuotaExceeded } else { ErrorKind::BudgetExceeded };
            GatewayError::new(kind, message).retry_after(until)
        }
        Shortage::Clock(window) => {
            let message = format!(
                "Budget {name} has newer windows than the {} of {}, so the clock of this gateway is or was wrong; set it",
                window.per.as_str(),
                window.start
            );
            GatewayError::new(ErrorKind::ModelNotReady, message)
        }
    }
}
