//! The fold by itself: what fits, what is refused, and what each directory needs.

use super::*;

const LIFE: Life = Life { broker: 3, epoch: 9 };
const DIR: DirNo = DirNo(1);
const FILE: FileNo = FileNo(2);

fn path(text: &str) -> StorePath {
    StorePath::parse(text).unwrap()
}

fn piece(pos: u64, len: u32, seq: u64) -> Piece {
    Piece { pos, len, at: 100 + pos as u32, seq }
}

fn chunk(from: u64, len: u64, number: u64) -> Chunk {
    Chunk { from, len, object: ObjectId { life: LIFE, number }, at: None }
}

fn begin(dir: DirNo, at: &str) -> Frame {
    Frame::Dir { dir, path: path(at), is_released: false, files: Vec::new() }
}

fn append(pos: u64, len: u32, seq: u64) -> Frame {
    Frame::Append { dir: DIR, file: FILE, piece: piece(pos, len, seq) }
}

fn put_chunk(from: u64, len: u64, number: u64) -> Frame {
    Frame::Chunk { dir: DIR, file: FILE, chunk: chunk(from, len, number) }
}

/// A directory with one file of three pieces of ten bytes, in blocks 5, 6 and 7.
fn tree() -> Tree<()> {
    let mut tree = Tree::default();
    let create = Frame::Create { dir: DIR, file: FILE, name: "a.log".to_owned() };
    let frames = [begin(DIR, "t/p-0"), create, append(0, 10, 5), append(10, 10, 6), append(20, 10, 7)];
    for (seq, frame) in [5, 5, 5, 6, 7].into_iter().zip(frames) {
        tree.apply(seq, frame, &mut Effects::default()).unwrap();
    }
    tree
}

fn apply(tree: &mut Tree<()>, frame: Frame) -> Result<Effects<()>, Corrupt> {
    let mut effects = Effects::default();
    tree.apply(9, frame, &mut effects).map(|()| effects)
}

fn numbers(effects: &Effects<()>) -> Vec<u64> {
    effects.objects.iter().map(|(_, _, _, chunk)| chunk.object.number).collect()
}

#[test]
fn the_first_two_components_own_a_file() {
    let owner = |text: &str| {
        let path = path(text);
        let (dir, name) = owner_of(&path);
        (dir.as_str().to_owned(), name.to_owned())
    };
    let pair = |dir: &str, name: &str| (dir.to_owned(), name.to_owned());
    assert_eq!(owner("file"), pair("", "file"));
    assert_eq!(owner("dir/file"), pair("dir", "file"));
    assert_eq!(owner("id/topic-0/0.log"), pair("id/topic-0", "0.log"));
    assert_eq!(owner("id/topic-0/deep/0.log"), pair("id/topic-0", "deep/0.log"));
}

#[test]
fn the_name_of_an_object_says_whose_it_is() {
    let object = ObjectId { life: LIFE, number: 77 };
    let named = object_path(&path("id/topic-0"), "00.log", object).unwrap();
    assert_eq!(named.as_str(), "data/id/topic-0/00.log.3-9.77");
    assert_eq!(object_of(named.name()), Some(object));
    assert_eq!(object_path(&StorePath::root(), "f", object).unwrap().as_str(), "data/f.3-9.77");
    for other in ["00.log", "00.log.77", "x.3-.1", "", "a.3-9.x"] {
        assert_eq!(object_of(other), None, "{other}");
    }
}

#[test]
fn a_pack_is_of_its_life_and_of_no_file() {
    let own = chunk(0, 5, 77);
    let packed = Chunk { at: Some(0), ..own };
    assert_eq!(own.path(&path("id/t-0"), "a").unwrap().as_str(), "data/id/t-0/a.3-9.77");
    assert_eq!(packed.path(&path("id/t-0"), "a").unwrap().as_str(), "packs/3-9/77");
    assert!(Chunk { at: Some(u64::MAX), ..own }.checked().is_err());
}

#[test]
fn an_object_takes_the_place_of_the_front_of_a_tail() {
    let mut tree = tree();
    let effects = apply(&mut tree, put_chunk(0, 15, 1)).unwrap();
    assert_eq!(effects.freed, [5]);
    let file = &tree.files[&FILE];
    assert_eq!((file.len, file.chunk_end(), file.tail_len()), (30, 15, 15));
    assert_eq!(file.pieces, [Piece { pos: 15, len: 5, at: 115, seq: 6 }, piece(20, 10, 7)]);
    assert_eq!(file.chunk_at(14), Some(&chunk(0, 15, 1)));
    assert_eq!(file.chunk_at(15), None);
    assert_eq!(file.pieces_at(19).count(), 2);
    assert_eq!(file.pieces_at(20).count(), 1);
    assert_eq!(file.pieces_at(30).count(), 0);
}

#[test]
fn an_object_takes_the_place_of_smaller_ones() {
    let mut tree = tree();
    for (from, number) in [(0, 1), (10, 2)] {
        apply(&mut tree, put_chunk(from, 10, number)).unwrap();
    }
    let effects = apply(&mut tree, put_chunk(0, 20, 3)).unwrap();
    assert_eq!((numbers(&effects), effects.freed.len()), (vec![1, 2], 0));
    let effects = apply(&mut tree, put_chunk(0, 30, 4)).unwrap();
    assert_eq!((numbers(&effects), &effects.freed[..]), (vec![3], &[7][..]));
    assert_eq!(tree.files[&FILE].chunks, [chunk(0, 30, 4)]);
}

#[test]
fn an_object_that_does_not_fit_is_refused() {
    for (from, len) in [(0, 0), (0, 31), (1, 9), (5, 20), (40, 1)] {
        assert!(apply(&mut tree(), put_chunk(from, len, 1)).is_err(), "{from} {len}");
    }
    for (from, len) in [(0, 5), (5, 5), (5, 20), (0, 31)] {
        let mut tree = tree();
        apply(&mut tree, put_chunk(0, 10, 1)).unwrap();
        assert!(apply(&mut tree, put_chunk(from, len, 2)).is_err(), "{from} {len}");
    }
}

#[test]
fn a_cut_goes_through_pieces_and_objects() {
    let cut = |tree: &mut Tree<()>, len| {
        let effects = apply(tree, Frame::Cut { dir: DIR, file: FILE, len }).unwrap();
        assert_eq!(tree.files[&FILE].len, len);
        effects
    };
    let mut tree = tree();
    apply(&mut tree, put_chunk(0, 10, 1)).unwrap();
    assert!(cut(&mut tree, 25).freed.is_empty());
    assert_eq!(tree.files[&FILE].pieces.back().map(|piece| piece.len), Some(5));
    assert_eq!(cut(&mut tree, 20).freed, [7]);
    assert_eq!(cut(&mut tree, 4).freed, [6]);
    assert_eq!(tree.files[&FILE].chunks, [chunk(0, 4, 1)]);
    apply(&mut tree, append(4, 6, 9)).unwrap();
    assert_eq!(numbers(&cut(&mut tree, 0)), [1]);
    assert!(tree.files[&FILE].chunks.is_empty() && tree.files[&FILE].pieces.is_empty());
    assert!(apply(&mut tree, Frame::Cut { dir: DIR, file: FILE, len: 1 }).is_err());
}

#[test]
fn what_does_not_fit_is_refused_and_what_is_older_is_skipped() {
    let unknown = FileNo(77);
    for frame in [
        append(29, 1, 9),
        append(31, 1, 9),
        Frame::Append { dir: DIR, file: unknown, piece: piece(0, 1, 9) },
        Frame::Create { dir: DIR, file: unknown, name: "a.log".to_owned() },
        Frame::Create { dir: DIR, file: FILE, name: "b.log".to_owned() },
        Frame::Cut { dir: DIR, file: unknown, len: 0 },
        Frame::Remove { gone: vec![(DIR, Some(unknown))] },
        Frame::Chunk { dir: DIR, file: unknown, chunk: chunk(0, 1, 1) },
        begin(DIR, "t/p-0"),
    ] {
        assert!(apply(&mut tree(), frame.clone()).is_err(), "{frame:?}");
    }
    let older = DirNo(0);
    for frame in [
        Frame::Append { dir: older, file: unknown, piece: piece(50, 1, 9) },
        Frame::Create { dir: older, file: unknown, name: "a.log".to_owned() },
        Frame::Put { dir: older, file: unknown, name: "a".to_owned(), chunks: vec![], piece: piece(0, 1, 9) },
        Frame::Cut { dir: older, file: unknown, len: 9 },
        Frame::Remove { gone: vec![(older, Some(unknown)), (older, None)] },
        Frame::Chunk { dir: older, file: unknown, chunk: chunk(0, 1, 1) },
    ] {
        let mut tree = tree();
        let effects = apply(&mut tree, frame).unwrap();
        assert!(effects.held.is_empty() && effects.objects.is_empty());
        assert_eq!((tree.files.len(), tree.files[&FILE].len), (1, 30));
    }
}

#[test]
fn a_directory_that_is_said_again_needs_only_what_it_refers_to() {
    let mut tree = tree();
    assert_eq!(tree.lowest(), Some(5));
    let file = |tail| FileFrame { file: FILE, name: "a.log".to_owned(), len: 30, chunks: Vec::new(), tail };
    let again = |tail| {
        let files = vec![file(tail)];
        Frame::Dir { dir: DIR, path: path("t/p-0"), is_released: false, files }
    };
    let here = Piece { pos: 0, len: 20, at: 3, seq: 9 };
    let effects = apply(&mut tree, again(vec![here, piece(20, 10, 7)])).unwrap();
    assert_eq!((effects.held, effects.freed), (vec![9, 7], vec![5, 6, 7]));
    assert_eq!(tree.lowest(), Some(7));
    let all = Piece { pos: 0, len: 30, at: 3, seq: 9 };
    apply(&mut tree, again(vec![all])).unwrap();
    assert_eq!(tree.lowest(), Some(9));
    apply(&mut tree, Frame::Remove { gone: vec![(DIR, None)] }).unwrap();
    assert_eq!((tree.lowest(), tree.files.len(), tree.dirs.len()), (None, 0, 0));
}

#[test]
fn a_new_incarnation_keeps_the_objects_and_a_removal_does_not() {
    let mut tree = tree();
    apply(&mut tree, put_chunk(0, 30, 1)).unwrap();
    let effects = apply(&mut tree, begin(DirNo(50), "t/p-0")).unwrap();
    assert_eq!((effects.removed.len(), effects.objects.len()), (1, 0));
    assert_eq!(tree.dir_at(&path("t/p-0")).map(|(dir, _)| dir), Some(DirNo(50)));
    let put = |file, number| Frame::Put {
        dir: DirNo(50),
        file: FileNo(file),
        name: "a".to_owned(),
        chunks: vec![chunk(0, 5, number)],
        piece: piece(5, 2, 9),
    };
    apply(&mut tree, put(51, 2)).unwrap();
    let effects = apply(&mut tree, put(52, 3)).unwrap();
    assert_eq!((numbers(&effects), effects.removed[0].0, effects.held), (vec![2], FileNo(51), vec![9]));
    assert_eq!(tree.files[&FileNo(52)].len, 7);
    let effects = apply(&mut tree, Frame::Remove { gone: vec![(DirNo(50), None)] }).unwrap();
    assert_eq!(numbers(&effects), [3]);
}

#[test]
fn the_directories_below_a_path_are_found_and_no_others() {
    let mut tree: Tree<()> = Tree::default();
    for (number, at) in ["", "t", "t/p-1", "t/p-10", "t-x", "u/p-1"].into_iter().enumerate() {
        apply(&mut tree, begin(DirNo(number as u64), at)).unwrap();
    }
    let within = |at: &str| tree.dirs_within(&path(at)).into_iter().map(|dir| dir.0).collect::<Vec<_>>();
    assert_eq!(within(""), [0, 1, 4, 2, 3, 5]);
    assert_eq!(within("t"), [1, 2, 3]);
    assert_eq!(within("t/p-1"), [2]);
    assert_eq!(within("u"), [5]);
    assert!(within("x").is_empty());
}
