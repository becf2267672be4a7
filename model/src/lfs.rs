//! Pointers of git-lfs: the small text that stands in place of a file where a repository was cloned without it.

/// How a pointer begins, by git-lfs' specification.
const START: &[u8] = b"version https://git-lfs.github.com/spec/";
/// How much of it is enough: a safetensors file with such a length would have 2 × 10^18 bytes.
const ENOUGH: usize = 8;

/// Whether a file that begins so, with eight bytes or more, is a pointer.
pub fn is_pointer(start: &[u8]) -> bool {
    let known = start.len().min(START.len());
    known >= ENOUGH && start[..known] == START[..known]
}
