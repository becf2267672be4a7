//! The OpenAI SDK's own tests, from its source distribution, and the Python that they run in. Never committed.

use std::ffi::OsString;

use anyhow::Result;

use crate::python::{self, OPENAI_VERSION};
use crate::wheel::Sdist;

/// Its source distribution.
const OPENAI_TESTS: Sdist = Sdist {
    package: "openai",
    version: OPENAI_VERSION,
    sha256: "258a4fec3e40b412c58672526ed33f20738c2e4ea27601792e73843af62466af",
    part: "tests",
    what: "the OpenAI SDK's own tests",
};
/// What the tests import beside the SDK.
const PINS: &str = "pytest==9.2.0\npytest-asyncio==1.5.0\nrich==15.0.0\naiohttp==3.14.5\n";

/// The variables by which the suite of scenarios finds them; what is missing is fetched.
pub fn openai() -> Result<[(String, OsString); 2]> {
    let folder = OPENAI_TESTS.folder(&format!("openai-tests-{}", OPENAI_TESTS.version))?;
    let python =
        python::environment("the OpenAI SDK and pytest", &format!("openai=={OPENAI_VERSION}\n{PINS}"))?;
    Ok([
        ("RUSSET_OPENAI_TESTS".to_owned(), folder.into()),
        ("RUSSET_PYTEST".to_owned(), python.interpreter().into()),
    ])
}
