//! Finds logins in what would become a service's file, which every user of the machine may read. Not here: how
//! the file is written.

/// Parameters of a URL's query that hold a login.
const QUERY_SECRETS: [&str; 8] =
    ["token", "access_token", "password", "passwd", "secret", "api_key", "apikey", "sig"];
/// Ends of the names of variables that hold a login; `_FILE` and `_PATH` behind them name a file.
const NAME_SECRETS: [&str; 7] = ["TOKEN", "PASSWORD", "PASSWD", "SECRET", "_KEY", "APIKEY", "CREDENTIALS"];

/// What a value of a flag or variable gives away, in words without it; `None` if nothing.
pub fn in_value(value: &str) -> Option<&'static str> {
    value.match_indices("://").find_map(|(at, separator)| {
        let scheme: String = value[..at].chars().rev().take_while(char::is_ascii_alphanumeric).collect();
        let scheme: String = scheme.chars().rev().collect();
        in_url(&scheme.to_ascii_lowercase(), &value[at + separator.len()..])
    })
}

/// Whether a variable's name says that its value is a login.
pub fn in_name(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    NAME_SECRETS.iter().any(|end| name.ends_with(end))
}

/// The part of a URL behind `://`, up to the next one in a list.
fn in_url(scheme: &str, rest: &str) -> Option<&'static str> {
    let rest = rest.split([' ', ',', ';']).next().unwrap_or_default();
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if let Some((login, _)) = authority.rsplit_once('@') {
        // A broker's user is no secret, its password is in a file; what stands alone before a web server is a
        // token.
        let is_user = matches!(scheme, "mqtt" | "mqtts" | "ssh") && !login.contains(':');
        return (!is_user).then_some("an address holds a login, such as a password");
    }
    // A password with a slash in it: what looks like a port is none.
    let port = authority.rsplit_once(':').map(|(_, port)| port);
    let is_port = |port: &str| port.is_empty() || port.ends_with(']') || port.parse::<u16>().is_ok();
    if port.is_some_and(|port| !is_port(port)) && rest.contains('@') {
        return Some("an address holds a login, such as a password");
    }
    let query = rest.split_once('?').map_or("", |(_, query)| query);
    let holds = |pair: &str| {
        let name = pair.split('=').next().unwrap_or_default().to_ascii_lowercase();
        QUERY_SECRETS.contains(&name.as_str()) || name.ends_with("-signature")
    };
    query.split('&').any(holds).then_some("the query of an address holds a token")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logins_in_addresses_are_found_wherever_they_stand() {
        for (value, found) in [
            ("https://hub.example", false),
            ("https://hub.example:8443/a@b", false),
            ("http://[::1]:8080/x@y", false),
            ("mqtt://me@host", false),
            ("mqtts://me@host:8883", false),
            ("/etc/russet/mqtt 100%", false),
            ("me:secret@host", false),
            ("https://hub.example/?page=2", false),
            ("https://me:secret@mirror", true),
            ("https://token@mirror/path", true),
            ("HTTPS://Me:Secret@mirror", true),
            ("mqtt://me:secret@host", true),
            ("mqtt://me:se/cret@host", true),
            ("mqtt://me:se?cret@host", true),
            ("--mqtt=mqtt://me:secret@host", true),
            ("https://a:2379,https://me:secret@b:2379", true),
            ("https://a b=https://me:secret@b", true),
            ("socks5://me:p@ss@proxy:1080", true),
            ("https://mirror/path?token=secret", true),
            ("https://mirror/path?a=b&X-Amz-Signature=secret", true),
        ] {
            assert_eq!(in_value(value).is_some(), found, "{value}");
        }
    }

    #[test]
    fn names_of_variables_tell_secrets() {
        for (name, secret) in [
            ("HF_TOKEN", true),
            ("hf_token", true),
            ("AWS_SECRET_ACCESS_KEY", true),
            ("RUSSET_KEY", true),
            ("MQTT_PASSWORD", true),
            ("MQTT_PASSWORD_FILE", false),
            ("AWS_ACCESS_KEY_ID", false),
            ("HF_ENDPOINT", false),
            ("RUSSET_LOG", false),
            ("NO_PROXY", false),
        ] {
            assert_eq!(in_name(name), secret, "{name}");
        }
    }
}
