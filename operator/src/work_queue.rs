//! Objects that are to be looked at, each once however often it was named meanwhile. On a thousand machines one
//! change names hundreds of deployments, and changes come quicker than anybody looks: what waits is bounded by the
//! objects there are, not by what happens to them.

use std::collections::HashSet;
use std::sync::Arc;

use futures::Stream;
use kube::Resource;
use kube::runtime::reflector::ObjectRef;
use parking_lot::Mutex;
use tokio::sync::mpsc;

/// The end where objects are named.
pub struct QueueSender<K: Resource<DynamicType = ()>> {
    waiting: PendingKeys<K>,
    channel: mpsc::UnboundedSender<ObjectRef<K>>,
}

/// The end where they are taken, in the order in which they were named first.
pub struct WorkQueue<K: Resource<DynamicType = ()>> {
    waiting: PendingKeys<K>,
    channel: mpsc::UnboundedReceiver<ObjectRef<K>>,
}

type PendingKeys<K> = Arc<Mutex<HashSet<ObjectRef<K>>>>;

/// A queue with nothing in it. It ends when its sender is gone.
pub fn work_queue<K: Resource<DynamicType = ()>>() -> (QueueSender<K>, WorkQueue<K>) {
    let waiting = PendingKeys::<K>::default();
    let (sender, receiver) = mpsc::unbounded_channel();
    (QueueSender { waiting: waiting.clone(), channel: sender }, WorkQueue { waiting, channel: receiver })
}

impl<K: Resource<DynamicType = ()>> QueueSender<K> {
    /// Names an object; where it waits already, nothing changes.
    pub fn add(&self, object: ObjectRef<K>) {
        if self.waiting.lock().insert(object.clone()) {
            // It fails only when the controllers have ended, and then nobody needs waking.
            let _ = self.channel.send(object);
        }
    }
}

impl<K: Resource<DynamicType = ()>> WorkQueue<K> {
    /// The next object that waits.
    async fn next(&mut self) -> Option<ObjectRef<K>> {
        let object = self.channel.recv().await?;
        // Before it is looked at: who names it from here on saw something newer.
        self.waiting.lock().remove(&object);
        Some(object)
    }

    /// All of them, as they come.
    pub fn stream(self) -> impl Stream<Item = ObjectRef<K>> {
        futures::stream::unfold(self, |mut queue| async { Some((queue.next().await?, queue)) })
    }
}

#[cfg(test)]
mod tests {
    use russet_crds::Model;

    use super::*;

    #[tokio::test]
    async fn queued_object_is_deduplicated_until_it_is_taken() {
        let (sender, mut queue) = work_queue::<Model>();
        let [a, b] = ["a", "b"].map(|name| ObjectRef::new(name).within("team"));
        for object in [&a, &b, &a, &a] {
            sender.add(object.clone());
        }
        assert_eq!(queue.next().await, Some(a.clone()));
        sender.add(a.clone());
        sender.add(b.clone());
        drop(sender);
        assert_eq!(queue.next().await, Some(b));
        assert_eq!(queue.next().await, Some(a));
        assert_eq!(queue.next().await, None);
    }
}
