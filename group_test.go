package outbox_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"gorm.io/gorm"

	"github.com/gormoutbox/outbox"
	"github.com/gormoutbox/outbox/internal/testdb"
)

// begin opens a transaction that is rolled back at the end of the test at the
// latest.
func begin(t testing.TB, db *gorm.DB) *gorm.DB {
	t.Helper()
	tx := db.Begin()
	if tx.Error != nil {
		t.Fatalf("begin: %v", tx.Error)
	}
	t.Cleanup(func() { tx.Rollback() })
	return tx
}

func add(t testing.TB, tx *gorm.DB, events ...outbox.Event) {
	t.Helper()
	if err := outbox.Add(tx, events...); err != nil {
		t.Fatal(err)
	}
}

func grouped(typ, group string) outbox.Message { return outbox.Message{Type: typ, GroupKey: group} }

// blocked waits until a session of the test's database waits for a lock.
func blocked(t testing.TB, db *gorm.DB) {
	t.Helper()
	for {
		var n int
		err := db.Raw("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name = ?", t.Name()).Scan(&n).Error
		if err != nil {
			t.Fatalf("look for a session that waits: %v", err)
		}
		if n > 0 {
			return
		}
		if err := t.Context().Err(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestBusyGroup(t *testing.T) {
	t.Parallel()
	db := testdb.Postgres(t).Gorm(t, testdb.Param("application_name", t.Name()))
	setUp(t, db, one(nil))
	holder := begin(t, db)
	add(t, holder, grouped("first", "g"))

	t.Run("lock_timeout", func(t *testing.T) {
		tx := begin(t, db)
		if err := tx.Exec("SET LOCAL lock_timeout = '20ms'").Error; err != nil {
			t.Fatal(err)
		}
		err := outbox.Add(tx, grouped("second", "g"))
		var cause interface{ SQLState() string }
		if !errors.Is(err, outbox.ErrGroupBusy) || !errors.As(err, &cause) || cause.SQLState() != "55P03" {
			t.Errorf("Add: %v, want ErrGroupBusy with its cause", err)
		}
	})
	t.Run("other groups flow", func(t *testing.T) {
		tx := begin(t, db)
		if err := tx.Exec("SET LOCAL lock_timeout = '20ms'").Error; err != nil {
			t.Fatal(err)
		}
		add(t, tx, grouped("other", "another"), message("ungrouped"))
	})
}

func TestBusyGroupUntilTheContextEnds(t *testing.T) {
	t.Parallel()
	db := testdb.Postgres(t).Gorm(t, testdb.Param("application_name", t.Name()))
	setUp(t, db, one(nil))
	add(t, begin(t, db), grouped("first", "g"))

	ctx, cancel := context.WithCancel(t.Context())
	tx := begin(t, db.WithContext(ctx))
	result := make(chan error)
	go func() { result <- outbox.Add(tx, grouped("second", "g")) }()
	blocked(t, db)
	cancel()
	if err := <-result; !errors.Is(err, outbox.ErrGroupBusy) || !errors.Is(err, context.Canceled) {
		t.Errorf("Add: %v, want ErrGroupBusy and the context's error", err)
	}
	if err := tx.Commit().Error; err == nil { // C05
		t.Error("the transaction committed")
	}
}

// C07: the database's own error in a nested transaction.
func TestBusyGroupInNestedTransaction(t *testing.T) {
	t.Parallel()
	db := testdb.Postgres(t).Gorm(t)
	createRows(t, db)
	c, r := relayed(nil)
	in := setUp(t, db, c)
	holder := begin(t, db)
	add(t, holder, grouped("held", "g"))
	inTx(t, db, func(tx *gorm.DB) error {
		err := tx.Transaction(func(nested *gorm.DB) error {
			if err := nested.Exec("SET LOCAL lock_timeout = '20ms'").Error; err != nil {
				return err
			}
			return outbox.Add(nested, grouped("lost", "g"))
		})
		if !errors.Is(err, outbox.ErrGroupBusy) {
			t.Errorf("nested Transaction: %v, want ErrGroupBusy", err)
		}
		return errors.Join(tx.Create(&Row{Name: "kept"}).Error, outbox.Add(tx, grouped("kept", "another")))
	})
	if n := countRows(t, db); n != 1 {
		t.Errorf("%d business rows, want 1", n)
	}
	drain(t, in)
	if got := r.types(); !slices.Equal(got, []string{"kept"}) {
		t.Errorf("delivered %v, want kept alone", got)
	}
}

// The second publisher waits for the first, so that ids follow commits.
func TestOverlappingPublishersAreSerialised(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*outbox.Outbox){
		"by group": nil,
		"total":    func(o *outbox.Outbox) { o.Ordering = outbox.Total },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testdb.Postgres(t).Gorm(t, testdb.Param("application_name", t.Name()))
			c, r := relayed(change)
			in := setUp(t, db, c)
			second := "g"
			if name == "total" {
				second = "another"
			}
			first := begin(t, db)
			add(t, first, grouped("first", "g"))
			result := make(chan error)
			go func() {
				result <- db.Transaction(func(tx *gorm.DB) error { return outbox.Add(tx, grouped("second", second)) })
			}()
			blocked(t, db)
			add(t, first, grouped("third", "g"))
			if err := first.Commit().Error; err != nil {
				t.Fatalf("commit: %v", err)
			}
			if err := <-result; err != nil {
				t.Fatalf("second publisher: %v", err)
			}
			drain(t, in)
			if got := r.types(); !slices.Equal(got, []string{"first", "third", "second"}) {
				t.Errorf("delivered %v, want the order of commits", got)
			}
		})
	}
}

func TestPublishersThatDoNotWait(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*outbox.Outbox){
		"concurrent publishers": func(o *outbox.Outbox) { o.ConcurrentPublishers = true },
		"concurrent, total":     func(o *outbox.Outbox) { o.ConcurrentPublishers, o.Ordering = true, outbox.Total },
		"no order":              func(o *outbox.Outbox) { o.Ordering = outbox.None },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testdb.Postgres(t).Gorm(t)
			setUp(t, db, one(change))
			add(t, begin(t, db), grouped("first", "g"))
			tx := begin(t, db)
			if err := tx.Exec("SET LOCAL lock_timeout = '20ms'").Error; err != nil {
				t.Fatal(err)
			}
			add(t, tx, grouped("second", "g"))
		})
	}
}
