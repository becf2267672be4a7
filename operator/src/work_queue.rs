//! Work queue: objects to reconcile, each queued once however often it was enqueued. On a thousand machines
//! one change enqueues hundreds of deployments, and changes come faster than they are handled: the queue is
//! bounded by the number of objects, not of events.

use std::collections::HashSet;
use std::sync::Arc;

use futures::Stream;
use kube::Resource;
use kube::runtime::reflector::ObjectRef;
use parking_lot::Mutex;
use tokio::sync::mpsc;

/// The sending end.
pub struct QueueSender<K: Resource<DynamicType = ()>> {
    waiting: PendingKeys<K>,
    channel: mpsc::UnboundedSender<ObjectRef<K>>,
}

/// The receiving end, first in, first out.
pub struct WorkQueue<K: Resource<DynamicType = ()>> {
    waiting: PendingKeys<K>,
    channel: mpsc::UnboundedReceiver<ObjectRef<K>>,
}

type PendingKeys<K> = Arc<Mutex<HashSet<ObjectRef<K>>>>;

/// An empty queue. It ends when its sender is dropped.
pub fn work_queue<K: Resource<DynamicType = ()>>() -> (QueueSender<K>, WorkQueue<K>) {
    let waiting = PendingKeys::<K>::default();
    let (sender, receiver) = mpsc::unbounded_channel();
    (QueueSender { waiting: waiting.clone(), channel: sender }, WorkQueue { waiting, channel: receiver })
}

impl<K: Resource<DynamicType = ()>> QueueSender<K> {
    /// Enqueues an object; no effect if it is queued already.
    pub fn add(&self, object: ObjectRef<K>) {
        if self.waiting.lock().insert(object.clone()) {
            // It fails only when the controllers have ended, and then nothing has to be triggered.
            let _ = self.channel.send(object);
        }
    }
}

impl<K: Resource<DynamicType = ()>> WorkQueue<K> {
    /// The next queued object.
    async fn next(&mut self) -> Option<ObjectRef<K>> {
        let object = self.channel.recv().await?;
        // Before it is reconciled: a later enqueue is for something newer.
        self.waiting.lock().remove(&object);
        Some(object)
    }

    /// All objects, as a stream.
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
