package gormoutbox_test

import (
	"errors"
	"runtime"
	"slices"
	"strings"
	"testing"
	"weak"

	"gorm.io/gorm"

	"github.com/gormoutbox/outbox/gormoutbox"
	"github.com/gormoutbox/outbox/internal/testdb"
)

var errRollBack = errors.New("roll back")

// C04
func TestFunctionsRunAfterTheCommit(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.open(t, gorm.Config{}, testdb.PoolSize(1))
		var c calls
		var seen []string
		tx := db.Begin()
		c.add(t, tx, "first")
		// On the only connection: it must be free.
		from(t, tx).OnCommit(func() { seen = names(t, db) })
		c.add(t, tx, "second")
		if err := tx.Create(&Row{Name: "third"}).Error; err != nil { // GORM's own end of a transaction
			t.Fatal(err)
		}
		c.want(t)
		if err := tx.Commit().Error; err != nil {
			t.Fatal(err)
		}
		c.want(t, "first", "second")
		if want := []string{"first", "second", "third"}; !slices.Equal(seen, want) {
			t.Errorf("a function saw the rows %q, want %q", seen, want)
		}
		if tx.Commit().Error == nil {
			t.Error("the second commit succeeded")
		}
		tx.Rollback()
		c.want(t, "first", "second")
	})
}

func TestFunctionsOfATransactionClosure(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.open(t, gorm.Config{})
		var c calls
		err := db.Transaction(func(tx *gorm.DB) error {
			c.add(t, tx, "one")
			c.add(t, tx.WithContext(t.Context()).Session(&gorm.Session{PrepareStmt: true}), "two")
			return tx.Transaction(func(tx *gorm.DB) error {
				c.add(t, tx, "three")
				return nil
			})
		})
		if err != nil {
			t.Fatal(err)
		}
		c.wantBoth(t, db, "one", "two", "three")
	})
}

// C04, C06
func TestNoFunctionsWithoutACommit(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.open(t, gorm.Config{}, testdb.PoolSize(1))
		var c calls

		tx := db.Begin()
		c.add(t, tx, "rolled back")
		tx.Rollback()
		tx.Commit()

		_ = db.Transaction(func(tx *gorm.DB) error {
			c.add(t, tx, "error")
			return errRollBack
		})
		func() {
			defer func() { _ = recover() }()
			_ = db.Transaction(func(tx *gorm.DB) error {
				c.add(t, tx, "panic")
				panic("request handler")
			})
		}()
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = db.Transaction(func(tx *gorm.DB) error {
				c.add(t, tx, "exit")
				runtime.Goexit()
				return nil
			})
		}()
		<-done
		c.wantBoth(t, db) // on the one connection: nothing was left open
	})
}

// C16: a COMMIT that fails ends the transaction all the same. On SQLite it
// would go on, on a connection of the pool.
func TestCommitFails(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.open(t, gorm.Config{}, testdb.PoolSize(1))
		for _, s := range []string{
			"CREATE TABLE parents (id integer PRIMARY KEY)",
			"CREATE TABLE children (parent integer REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED)",
		} {
			if err := db.Exec(s).Error; err != nil {
				t.Fatal(err)
			}
		}
		if !b.postgres {
			db.Exec("PRAGMA foreign_keys = on")
		}
		var c calls
		for range 2 {
			err := db.Transaction(func(tx *gorm.DB) error {
				c.add(t, tx, "never")
				return tx.Exec("INSERT INTO children VALUES (1)").Error
			})
			if err == nil {
				t.Fatal("the commit succeeded")
			}
		}
		c.wantBoth(t, db)
		err := db.Transaction(func(tx *gorm.DB) error {
			c.add(t, tx, "afterwards")
			return nil
		})
		if err != nil {
			t.Errorf("the next transaction: %v", err)
		}
		c.wantBoth(t, db, "afterwards")
	})
}

// C06
func TestBeginThatNobodyFinishes(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.open(t, gorm.Config{}, testdb.PoolSize(2))
		var c calls
		tx := db.Begin()
		from(t, tx).OnCommit(c.call("leaked"))
		err := db.Transaction(func(other *gorm.DB) error {
			c.add(t, other, "other")
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		c.wantBoth(t, db, "other")
		tx.Rollback()
		c.want(t, "other")
	})
}

// C07
func TestNoFunctionsAfterAnAbortedTransaction(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		if !b.postgres {
			t.Skip("a failed statement does not abort a transaction of SQLite")
		}
		db := b.open(t, gorm.Config{})
		var c calls
		bad := func(tx *gorm.DB) error {
			_, err := from(t, tx).ExecContext(t.Context(), "INSERT INTO rows (name) VALUES ($1)", "\xff")
			if err == nil {
				t.Error("bad UTF-8 was stored")
			}
			return err
		}
		err := db.Transaction(func(tx *gorm.DB) error {
			c.add(t, tx, "lost")
			_ = bad(tx)
			return nil
		})
		if err == nil {
			t.Error("the commit of an aborted transaction succeeded")
		}
		c.wantBoth(t, db)

		err = db.Transaction(func(tx *gorm.DB) error {
			c.add(t, tx, "kept")
			_ = tx.Transaction(func(tx *gorm.DB) error {
				c.add(t, tx, "dropped")
				return bad(tx)
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		c.wantBoth(t, db, "kept")
	})
}

func TestAPanicDoesNotHideTheCommit(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		log := newRecorder()
		db := b.open(t, gorm.Config{Logger: log})
		var c calls
		err := db.Transaction(func(tx *gorm.DB) error {
			c.add(t, tx, "before")
			from(t, tx).OnCommit(func() { panic("of a function") })
			c.add(t, tx, "after")
			return nil
		})
		if err != nil {
			t.Errorf("the commit returned %v", err)
		}
		c.wantBoth(t, db, "before", "after")
		if len(log.errors) != 1 || !strings.Contains(log.errors[0], "of a function") || !strings.Contains(log.errors[0], "commit_test.go") {
			t.Errorf("logged %q, want the panic with its stack", log.errors)
		}
	})
}

func TestOnCommitAfterTheEnd(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.open(t, gorm.Config{})
		var c calls
		tx := db.Begin()
		own := from(t, tx)
		own.OnCommit(func() { own.OnCommit(c.call("within")) })
		if err := tx.Commit().Error; err != nil {
			t.Fatal(err)
		}
		own.OnCommit(c.call("after"))
		tx.Commit()
		c.want(t)
	})
}

// Hooked has a function as its model hooks.
type Hooked struct {
	ID   int64
	Name string
	hook func(tx *gorm.DB) error
}

func (h *Hooked) AfterCreate(tx *gorm.DB) error { return h.hook(tx) }
func (h *Hooked) AfterUpdate(tx *gorm.DB) error { return h.hook(tx) }
func (h *Hooked) AfterDelete(tx *gorm.DB) error { return h.hook(tx) }

// C11
func TestHandleOfAModelHook(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		for _, skip := range []bool{false, true} {
			db := b.open(t, gorm.Config{SkipDefaultTransaction: skip})
			if err := db.AutoMigrate(&Hooked{}); err != nil {
				t.Fatal(err)
			}
			var c calls
			for _, fails := range []error{nil, errRollBack} {
				err := db.Create(&Hooked{hook: func(tx *gorm.DB) error {
					if skip {
						refused(t, "hook without a transaction", tx, gormoutbox.ErrNotInTransaction)
						return nil
					}
					c.add(t, tx, "hook")
					return fails
				}}).Error
				if !skip && !errors.Is(err, fails) {
					t.Fatalf("Create = %v, want %v", err, fails)
				}
			}
			if skip {
				c.want(t)
				continue
			}
			c.wantBoth(t, db, "hook") // of the first, which succeeded
			empty(t, db)
		}
	})
}

// Nothing of a transaction outlives it, or the savepoint it belongs to.
func TestFunctionsAreForgotten(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(tx *gorm.DB){
		"commit":    func(tx *gorm.DB) { tx.Commit() },
		"rollback":  func(tx *gorm.DB) { tx.Rollback() },
		"savepoint": func(tx *gorm.DB) { tx.RollbackTo("s") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testdb.SQLite(t).Gorm(t)
			if err := gormoutbox.Install(db); err != nil {
				t.Fatal(err)
			}
			tx := db.Begin()
			defer tx.Rollback()
			tx.SavePoint("s")
			own := from(t, tx)
			held := register(own)
			runtime.GC()
			if held.Value() == nil {
				t.Fatal("the function is gone before the end")
			}
			end(tx)
			late := register(own)
			runtime.GC()
			if held.Value() != nil {
				t.Error("the function is still held")
			}
			if name != "savepoint" && late.Value() != nil {
				t.Error("a function is held that came after the end")
			}
			runtime.KeepAlive(own)
		})
	}
}

// register adds a function to tx and returns a value that only the function
// holds.
func register(tx *gormoutbox.Tx) weak.Pointer[[64]byte] {
	held := new([64]byte)
	tx.OnCommit(func() { held[0]++ })
	return weak.Make(held)
}
