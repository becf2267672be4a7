//! Properties of MLX's default device.

use crate::error::{Error, check, install_error_handler};

/// Metal's key for the memory that a program should keep resident; other devices do not have it.
const WORKING_SET: &std::ffi::CStr = c"max_recommended_working_set_size";

/// MLX's key for the name of the chip.
const NAME: &std::ffi::CStr = c"device_name";

/// Device information; frees itself.
struct Info(mlx_sys::mlx_device_info);

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: the guard is the only owner.
        unsafe { mlx_sys::mlx_device_info_free(self.0) };
    }
}

/// A device; frees itself.
struct Device(mlx_sys::mlx_device);

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: the guard is the only owner.
        unsafe { mlx_sys::mlx_device_free(self.0) };
    }
}

/// What the default device says of itself.
fn info() -> Result<Info, Error> {
    install_error_handler();
    // SAFETY: makes an empty device, owned by the guard, that the next call fills.
    let mut device = Device(unsafe { mlx_sys::mlx_device_new() });
    // SAFETY: the device is live.
    check("find the default device", unsafe { mlx_sys::mlx_get_default_device(&mut device.0) })?;
    // SAFETY: makes an empty object, owned by the guard, that the next call fills.
    let mut info = Info(unsafe { mlx_sys::mlx_device_info_new() });
    // SAFETY: both are live.
    check("ask the device", unsafe { mlx_sys::mlx_device_info_get(&mut info.0, device.0) })?;
    Ok(info)
}

/// The name of the chip, such as `Apple M3 Ultra`; empty where the device does not say it.
pub fn name() -> Result<String, Error> {
    let info = info()?;
    let (mut exists, mut name) = (false, std::ptr::null());
    // SAFETY: the object is live and the key ends with a zero.
    check("ask the device", unsafe { mlx_sys::mlx_device_info_has_key(&mut exists, info.0, NAME.as_ptr()) })?;
    if !exists {
        return Ok(String::new());
    }
    // SAFETY: as above; MLX writes a pointer to a text that the object owns.
    check("ask the device", unsafe {
        mlx_sys::mlx_device_info_get_string(&mut name, info.0, NAME.as_ptr())
    })?;
    if name.is_null() {
        return Ok(String::new());
    }
    // SAFETY: the text ends with a zero and lives as long as the object.
    Ok(unsafe { std::ffi::CStr::from_ptr(name) }.to_string_lossy().into_owned())
}

/// Recommended resident bytes of the default device; `None` where the device reports none, as a CPU does.
pub fn recommended_working_set() -> Result<Option<usize>, Error> {
    let info = info()?;
    let (mut exists, mut bytes) = (false, 0);
    // SAFETY: the object is live and the key ends with a zero.
    check("ask the device", unsafe {
        mlx_sys::mlx_device_info_has_key(&mut exists, info.0, WORKING_SET.as_ptr())
    })?;
    if !exists {
        return Ok(None);
    }
    // SAFETY: as above; MLX writes a number.
    check("ask the device", unsafe {
        mlx_sys::mlx_device_info_get_size(&mut bytes, info.0, WORKING_SET.as_ptr())
    })?;
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chip_has_a_name() {
        let name = name().unwrap();
        assert!(name.chars().any(char::is_alphabetic), "{name:?}");
        if cfg!(target_os = "macos") {
            assert!(name.starts_with("Apple"), "{name:?}");
        }
    }

    #[test]
    fn a_cpu_recommends_nothing_and_a_gpu_something() {
        let recommended = recommended_working_set().unwrap();
        if cfg!(target_os = "macos") {
            assert!(recommended.is_some_and(|bytes| bytes > 1 << 30), "{recommended:?}");
        } else {
            assert_eq!(recommended, None);
        }
    }
}
