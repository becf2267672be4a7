//! Errors of the API server in its own words. kube's text of such an error ends in the Debug form of a Status.
//! Not here: the errors of verbs.

use kube::core::Status;

/// `error` and its causes in one line; answers of the API server are their message.
pub fn text(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let status = match cause.downcast_ref::<kube::Error>() {
            Some(kube::Error::Api(status)) => Some(status),
            _ => None,
        };
        let words = status.map_or_else(|| cause.to_string(), |status| answer(status));
        if !line.contains(&words) {
            if !line.is_empty() {
                line.push_str(": ");
            }
            line.push_str(&words);
        }
        // Its source is the same Status.
        if status.is_some() {
            break;
        }
    }
    line
}

/// What the API server answered.
pub fn answer(status: &Status) -> String {
    match (status.message.trim(), status.reason.trim()) {
        ("", "") => format!("the API server answers {}", status.code),
        ("", reason) => format!("the API server answers {} {reason}", status.code),
        (message, _) => message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_the_api_server_are_shown_without_debug_text() {
        let refused = |message: &str, reason: &str| {
            kube::Error::Api(Box::new(Status::failure(message, reason).with_code(404)))
        };
        for (error, expected) in [
            (refused("pods \"x\" not found", "NotFound"), "pods \"x\" not found"),
            (refused("", "NotFound"), "the API server answers 404 NotFound"),
            (refused("", ""), "the API server answers 404"),
        ] {
            assert_eq!(
                text(&anyhow::Error::new(error).context("cannot read")),
                format!("cannot read: {expected}")
            );
        }
        assert_eq!(text(&anyhow::anyhow!("inner").context("outer: inner")), "outer: inner");
    }
}
