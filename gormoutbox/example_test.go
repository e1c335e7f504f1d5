package gormoutbox_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/glebarez/sqlite"
	"gorm.io/gorm"

	"github.com/gormoutbox/outbox/gormoutbox"
)

// A function runs if what it belongs to was committed.
func ExampleTx_OnCommit() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	db, err := gorm.Open(sqlite.Open(filepath.Join(dir, "example.db")), &gorm.Config{})
	if err != nil {
		panic(err)
	}
	if err := gormoutbox.Install(db); err != nil {
		panic(err)
	}

	tell := func(db *gorm.DB, what string) error {
		tx, err := gormoutbox.From(db)
		if err != nil {
			return err
		}
		tx.OnCommit(func() { fmt.Println("committed:", what) })
		return nil
	}
	err = db.Transaction(func(tx *gorm.DB) error {
		_ = tx.Transaction(func(tx *gorm.DB) error {
			return errors.Join(tell(tx, "the inner level"), errors.New("roll back to the savepoint"))
		})
		defer fmt.Println("before the commit")
		return tell(tx, "the outer level")
	})
	fmt.Println("error:", err)
	fmt.Println("outside:", errors.Is(tell(db, "nothing"), gormoutbox.ErrNotInTransaction))

	if pool, err := gormoutbox.Primary(db); err == nil {
		_ = pool.Close()
	}
	// Output:
	// before the commit
	// committed: the outer level
	// error: <nil>
	// outside: true
}
