//! Copy-on-write wrapper for parts of a view that many copies of the view share. It dereferences to its
//! content.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// A value that is cheap to clone until it is changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ArcCow<T>(Arc<T>);

impl<T> Deref for ArcCow<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Clone> DerefMut for ArcCow<T> {
    fn deref_mut(&mut self) -> &mut T {
        Arc::make_mut(&mut self.0)
    }
}

impl<T> From<T> for ArcCow<T> {
    fn from(whole: T) -> Self {
        Self(Arc::new(whole))
    }
}

impl<T: FromIterator<I>, I> FromIterator<I> for ArcCow<T> {
    fn from_iter<A: IntoIterator<Item = I>>(items: A) -> Self {
        T::from_iter(items).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mutation_does_not_affect_other_clones() {
        let first: ArcCow<Vec<u32>> = [1, 2].into_iter().collect();
        let mut second = first.clone();
        assert!(Arc::ptr_eq(&first.0, &second.0));
        second.push(3);
        assert_eq!((first.len(), second.len()), (2, 3));
    }
}
