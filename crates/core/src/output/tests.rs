//! What becomes of output files, of what was there before, and of what killed processes left.

use super::*;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_file_appears_when_it_is_complete_and_not_at_all_when_it_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out");
    let mut file = OutputFile::create(&path).unwrap();
    file.write_all(b"half").unwrap();
    assert!(!path.exists());
    drop(file);
    assert!(names(folder.path()).is_empty(), "dropped unfinished");
    write_whole(&path, b"first").unwrap();
    write_whole(&path, b"second").unwrap();
    assert_eq!((std::fs::read(&path).unwrap(), names(folder.path())), (b"second".to_vec(), vec!["out".to_owned()]));
    let kept = OutputFile::create(&path).unwrap().finish(Existing::Keep);
    assert!(matches!(kept, Err(OutputError::Exists { .. })));
    assert_eq!(std::fs::read(&path).unwrap(), b"second");
}

#[test]
fn a_name_as_long_as_file_systems_allow_can_be_written() {
    let folder = tempfile::tempdir().unwrap();
    write_whole(&folder.path().join("n".repeat(255)), b"x").unwrap();
    assert_eq!(names(folder.path()), ["n".repeat(255)]);
}

#[test]
fn what_is_no_file_is_refused_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |path: &Path| check(&[path], &[], Existing::Replace).unwrap_err().to_string();
    assert!(refused(folder.path()).contains("a folder is there"));
    assert!(refused(Path::new("/dev/null")).contains("a device"));
    assert!(refused(&folder.path().join("new/")).contains("file name"));
    let nowhere = refused(&folder.path().join("nowhere/out"));
    assert!(nowhere.contains("nowhere/out") && !nowhere.contains("partial"), "{nowhere}");
    let protected = folder.path().join("protected");
    std::fs::write(&protected, "x").unwrap();
    std::fs::set_permissions(&protected, std::fs::Permissions::from_mode(0o444)).unwrap();
    assert!(refused(&protected).contains("write-protected"));
}

#[test]
fn an_output_that_is_an_input_is_refused_under_every_name() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let model = at("model.gguf");
    std::fs::write(&model, "model").unwrap();
    symlink(&model, at("link")).unwrap();
    std::fs::hard_link(&model, at("hard")).unwrap();
    std::fs::create_dir(at("sub")).unwrap();
    for name in ["model.gguf", "link", "hard", "sub/../model.gguf"] {
        let error = check(&[&at(name)], &[&model], Existing::Replace).unwrap_err();
        assert!(matches!(error, OutputError::IsInput { .. }), "{name}: {error}");
    }
    check(&[&at("other")], &[&model, Path::new("-")], Existing::Replace).unwrap();
    // Of a folder the files of the checkpoint, of a part of a split file all its parts.
    std::fs::write(at("config.json"), "{}").unwrap();
    std::fs::write(at("m-00002-of-00002.gguf"), "part").unwrap();
    let first = at("m-00001-of-00002.gguf");
    for (output, input) in [("config.json", folder.path()), ("m-00002-of-00002.gguf", first.as_path())] {
        let error = check(&[&at(output)], &[input], Existing::Replace).unwrap_err();
        assert!(matches!(error, OutputError::IsInput { .. }), "{output}: {error}");
    }
    check(&[&model], &[folder.path()], Existing::Replace).unwrap();
    assert_eq!(std::fs::read(&model).unwrap(), b"model");
}

#[test]
fn two_outputs_with_one_name_are_refused_also_before_they_exist() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::create_dir(at("sub")).unwrap();
    let error = check(&[&at("new"), &at("sub/../new")], &[], Existing::Replace).unwrap_err();
    assert!(matches!(error, OutputError::Twice { .. }), "{error}");
    check(&[&at("new"), &at("sub/new")], &[], Existing::Replace).unwrap();
}

#[test]
fn an_output_through_a_link_goes_where_the_link_points() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("file"), "old").unwrap();
    symlink(at("file"), at("link")).unwrap();
    write_whole(&at("link"), b"new").unwrap();
    assert!(at("link").is_symlink());
    assert_eq!(std::fs::read(at("file")).unwrap(), b"new");
    symlink(at("nothing"), at("dangling")).unwrap();
    assert!(write_whole(&at("dangling"), b"x").is_err());
}

#[test]
fn leftovers_of_dead_processes_are_removed_and_no_others() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    // A process that has ended and was waited for.
    let mut child = std::process::Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    let dead = child.id();
    let alive = std::os::unix::process::parent_id();
    let (left, others) = (format!(".out.{dead}.0.partial"), format!(".other.{dead}.3.partial"));
    let kept = [format!(".out.{alive}.0.partial"), ".out.x.0.partial".into(), format!("out.{dead}.0.partial")];
    let locked = format!(".out.{dead}.1.partial");
    for name in kept.iter().chain([&left, &others, &locked]) {
        std::fs::write(at(name), "half").unwrap();
    }
    let lock = std::fs::File::open(at(&locked)).unwrap();
    lock.try_lock().unwrap();
    write_whole(&at("out"), b"whole").unwrap();
    assert!(!at(&left).exists());
    assert!(at(&others).exists(), "another file's leftover");
    assert!(at(&locked).exists(), "somebody holds its lock");
    drop(lock);
    remove_leftovers(folder.path(), None);
    let mut expected = kept.to_vec();
    expected.push("out".into());
    expected.sort();
    assert_eq!(names(folder.path()), expected);
}

#[test]
fn a_file_that_is_appended_to_keeps_the_rules() {
    let folder = tempfile::tempdir().unwrap();
    let journal = folder.path().join("new/journal");
    check_append(&journal, &[]).unwrap();
    assert!(!journal.exists(), "a check writes nothing");
    std::fs::write(&journal, "line\n").unwrap();
    check_append(&journal, &[]).unwrap();
    assert!(matches!(check_append(&journal, &[&journal]), Err(OutputError::IsInput { .. })));
    assert!(check_append(folder.path(), &[]).is_err());
    assert_eq!(std::fs::read(&journal).unwrap(), b"line\n");
}
