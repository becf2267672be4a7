//! Masks of the tokens that a response's grammar allows, computed beside the forward step that needs them: a thread
//! begins with them when the step begins, and the MLX thread takes them, or computes what is not begun.

use std::fmt;
use std::io;
use std::sync::{Arc, mpsc};

use parking_lot::Mutex;
use russet_chat::grammar::{GrammarError, GrammarMatcher, TokenMask};

/// The state of a response's grammar, shared with the masks of its next step.
pub type SharedMatcher = Arc<Mutex<GrammarMatcher>>;

/// The masks of one step: of its token, and of the token after each draft token.
pub struct TokenMasks(Mutex<MaskState>);

enum MaskState {
    Pending { matcher: SharedMatcher, drafts: Vec<u32> },
    Computed(Result<Vec<Arc<TokenMask>>, GrammarError>),
}

impl fmt::Debug for TokenMasks {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("TokenMasks").finish_non_exhaustive()
    }
}

impl TokenMasks {
    /// Computes them, unless that is done. Until then the grammar must take no token.
    pub fn compute(&self) {
        let _ = self.at(0);
    }

    /// The mask after so many draft tokens; computes all of them, unless that is done.
    fn at(&self, position: usize) -> Result<Option<Arc<TokenMask>>, GrammarError> {
        let mut state = self.0.lock();
        if let MaskState::Pending { matcher, drafts } = &*state {
            let masks = matcher.lock().masks(drafts);
            *state = MaskState::Computed(masks.map(|masks| masks.into_iter().map(Arc::new).collect()));
        }
        match &*state {
            MaskState::Computed(Ok(masks)) => Ok(masks.get(position).cloned()),
            MaskState::Computed(Err(error)) => Err(error.clone()),
            MaskState::Pending { .. } => Ok(None),
        }
    }
}

/// The mask of one token of a step.
#[derive(Clone, Debug)]
pub struct StepMask {
    masks: Arc<TokenMasks>,
    position: usize,
}

impl PartialEq for StepMask {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.masks, &other.masks) && self.position == other.position
    }
}

impl StepMask {
    /// Of the tokens that the grammar allows, first where it is, then after each draft token.
    pub fn of_grammar(matcher: &SharedMatcher, drafts: &[u32]) -> Self {
        let pending = MaskState::Pending { matcher: matcher.clone(), drafts: drafts.to_vec() };
        Self { masks: Arc::new(TokenMasks(Mutex::new(pending))), position: 0 }
    }

    /// Of one token.
    pub fn only(token: u32) -> Self {
        let computed = MaskState::Computed(Ok(vec![Arc::new(TokenMask::only(token))]));
        Self { masks: Arc::new(TokenMasks(Mutex::new(computed))), position: 0 }
    }

    /// The mask after so many draft tokens.
    #[must_use]
    pub fn after(&self, drafts: u32) -> Self {
        Self { masks: self.masks.clone(), position: self.position + drafts as usize }
    }

    /// The masks of its step, for the thread.
    pub fn step(&self) -> Arc<TokenMasks> {
        self.masks.clone()
    }

    /// The mask; computes it if nobody does. `None` behind a draft token that the grammar does not allow, which is
    /// rejected whatever is sampled here.
    ///
    /// # Errors
    /// [`GrammarError::TooComplex`].
    pub fn get(&self) -> Result<Option<Arc<TokenMask>>, GrammarError> {
        self.masks.at(self.position)
    }
}

/// The thread that computes masks while MLX computes logits. It ends with its last handle.
#[derive(Clone)]
pub struct MaskThread(mpsc::Sender<Arc<TokenMasks>>);

impl MaskThread {
    /// Starts it.
    ///
    /// # Errors
    /// The system cannot start threads.
    pub fn start() -> io::Result<Self> {
        let (sender, masks) = mpsc::channel::<Arc<TokenMasks>>();
        std::thread::Builder::new()
            .name("masks".into())
            .spawn(move || masks.into_iter().for_each(|masks| masks.compute()))?;
        Ok(Self(sender))
    }

    /// Begins with the masks of a step.
    pub fn begin(&self, masks: Arc<TokenMasks>) {
        // Without the thread, the MLX thread computes them.
        let _ = self.0.send(masks);
    }
}
