//! The keys that all servers of one control plane must have in common: the authority's and the one that signs tokens.
//! They live in the store, beside the objects that already hold the authority's key as a Secret; whoever may read etcd
//! is trusted with them. The first server brings its own, every other one takes them over, and each keeps a copy in its
//! data directory.

use std::path::Path;

use rcgen::KeyPair;
use serde_json::{Value, json};

use super::{Authority, PkiError, read, write_private};
use crate::store::{TxnChange, Expect, TxnOutcome, Store, StoreError, Txn};

/// Where they are stored: not under `/registry/`, so that no verb of the API reaches them.
const KEY: &str = "/keys/control-plane";
/// The files, by the names they also have in the store. Keys come before the certificate: one without its key would look
/// like an authority that lost it.
const FILES: [&str; 3] = ["ca.key", "sa.key", "ca.crt"];

/// Why the keys could not be shared.
#[derive(Debug, thiserror::Error)]
pub enum SharedError {
    /// The data directory has others.
    #[error(
        "{file} is not the one this etcd holds: the data directory belongs to another control plane; choose another with --data-dir, or another --etcd-prefix"
    )]
    Other {
        /// The file.
        file: String,
    },
    /// What is stored is incomplete.
    #[error("the keys in etcd are incomplete ({0} is missing); put them back from a backup")]
    Incomplete(&'static str),
    /// The files.
    #[error(transparent)]
    Pki(#[from] PkiError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Makes the files in `dir` those of the store, or those of the store the ones in `dir` if it has none.
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
        // Nobody deletes this key; if a person does at this very moment, the next start makes it anew.
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
        // One that ran alone before brings what it has.
        let pin = Authority::ensure(&first).unwrap().pin().unwrap();
        crate::auth::tokens::Signer::ensure(&first.join("sa.key")).unwrap();
        adopt(&store, &first).await.unwrap();
        adopt(&store, &second).await.unwrap();
        assert_eq!(files(&second).unwrap(), files(&first).unwrap());
        assert_eq!(Authority::ensure(&second).unwrap().pin().unwrap(), pin);
        adopt(&store, &second).await.unwrap();
        Authority::ensure(&stranger).unwrap();
        crate::auth::tokens::Signer::ensure(&stranger.join("sa.key")).unwrap();
        let refused = adopt(&store, &stranger).await.unwrap_err();
        assert!(refused.to_string().contains("--data-dir"), "{refused}");
    }
}
