// Package storagetest checks an engine.Storage against its contract. Both
// storages of the library pass it; another one can be tested the same way:
//
//	func TestConformance(t *testing.T) {
//		storagetest.Run(t, storagetest.Harness{
//			New: func(t *testing.T) storagetest.Instance { … },
//		})
//	}
//
// It uses the standard library's testing package only. Every subtest runs in
// parallel with the others, on an instance of its own.
package storagetest
