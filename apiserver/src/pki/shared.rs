//! Keys shared by all servers of one control plane: the CA's, and the one that signs tokens. They are in the
//! store, beside the objects that already hold the CA's key as a Secret; readers of etcd are trusted with
//! them. The first server stores its own keys, the others adopt them, and each keeps a copy in its data
//! directory.

use std::path::Path;

use rcgen::KeyPair;
use serde_json::{Value, json};

use super::{Authority, PkiError, read, write_private};
use crate::store::{Expect, Store, StoreError, Txn, TxnChange, TxnOutcome};

/// Their storage key: not under `/registry/`, so that no API verb reaches it.
const KEY: &str = "/keys/control-plane";
/// The files, by the names they also have in the store. Keys come before the certificate: a certificate
/// without its key would look like a CA that lost its key.
const FILES: [&str; 3] = ["ca.key", "sa.key", "ca.crt"];

/// Why the keys cannot be shared.
#[derive(Debug, thiserror::Error)]
pub enum SharedError {
    /// The data directory has different keys.
    #[error(
        "{file} differs from the one in etcd: the data directory belongs to another control plane; choose another with --data-dir, or another --etcd-prefix"
    )]
    Other {
        /// The file.
        file: String,
    },
    /// A file is missing in the store.
    #[error("the keys in etcd are incomplete ({0} is missing); restore them from a backup")]
    Incomplete(&'static str),
    /// The local files failed.
    #[error(transparent)]
    Pki(#[from] PkiError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Stores the files in `dir` if the store has none, and otherwise writes the stored ones to `dir`.
pub async fn adopt(store: &dyn Store, dir: &Path) -> Result<(), SharedError> {
    let own = if FILES.iter().all(|file| dir.join(file).exists()) { Some(files(dir)?) } else { None };
    let offered = match &own {
        Some(own) => own.clone(),
        None => fresh()?,
    };
    let change = TxnChange::Put(offered.to_string().into());
    let txn = Txn { key: KEY.into(), expect: Expect::Absent, change };
    let stored = match store.txn(txn).await? {
        TxnOutcome::Committed(_) => offered,
        TxnOutcome::Conflict(Some(record)) => Value::clone(record.object()),
        // No component deletes this key; if a person does at this moment, the next start creates it again.
        TxnOutcome::Conflict(None) => return Err(SharedError::Incomplete(FILES[0])),
    };
    for file in FILES {
        let text = stored[file].as_str().ok_or(SharedError::Incomplete(file))?;
        let path = dir.join(file);
        match &own {
            Some(own) if own[file] == text => {}
            Some(_) => return Err(SharedError::Other { file: path.display().to_string() }),
            None => write_private(&path, text.as_bytes())?,
        }
    }
    Ok(())
}

fn files(dir: &Path) -> Result<Value, PkiError> {
    let mut all = json!({});
    for file in FILES {
        all[file] = Value::String(read(&dir.join(file))?);
    }
    Ok(all)
}

fn fresh() -> Result<Value, PkiError> {
    let authority = Authority::generate("russet-ca")?;
    let signer = KeyPair::generate().map_err(|error| super::unusable("new service account key", error))?;
    Ok(json!({
        "ca.crt": authority.cert_pem(),
        "ca.key": authority.key_pem(),
        "sa.key": signer.serialize_pem(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::embedded::Embedded;

    #[tokio::test]
    async fn first_server_stores_its_keys_and_others_adopt_them() {
        let folder = tempfile::tempdir().unwrap();
        let store = Embedded::open(&folder.path().join("store.redb")).unwrap();
        let place = |name: &str| {
            let place = folder.path().join(name);
            std::fs::create_dir(&place).unwrap();
            place
        };
        let (first, second, stranger) = (place("first"), place("second"), place("stranger"));
        // A server that ran alone before stores its own keys.
        let pin = Authority::ensure(&first).unwrap().pin().unwrap();
        crate::auth::signer::Signer::ensure(&first.join("sa.key")).unwrap();
        adopt(&store, &first).await.unwrap();
        adopt(&store, &second).await.unwrap();
        assert_eq!(files(&second).unwrap(), files(&first).unwrap());
        assert_eq!(Authority::ensure(&second).unwrap().pin().unwrap(), pin);
        adopt(&store, &second).await.unwrap();
        Authority::ensure(&stranger).unwrap();
        crate::auth::signer::Signer::ensure(&stranger.join("sa.key")).unwrap();
        let refused = adopt(&store, &stranger).await.unwrap_err();
        assert!(refused.to_string().contains("--data-dir"), "{refused}");
    }
}
