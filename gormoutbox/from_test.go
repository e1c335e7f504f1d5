package gormoutbox_test

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"strings"
	"testing"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/gormoutbox/outbox/gormoutbox"
	"github.com/gormoutbox/outbox/internal/testdb"
)

// refused checks that From refuses db with all of the errors.
func refused(t *testing.T, what string, db *gorm.DB, want ...error) {
	t.Helper()
	tx, err := gormoutbox.From(db)
	if err == nil || tx != nil {
		t.Errorf("%s: From = %v, %v, want an error", what, tx, err)
		return
	}
	for _, w := range want {
		if !errors.Is(err, w) {
			t.Errorf("%s: %q is no %q", what, err, w)
		}
	}
}

func TestFromHandlesOfATransaction(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.open(t, gorm.Config{})
		var c calls
		check := func(tx *gorm.DB) error {
			for name, handle := range map[string]*gorm.DB{
				"itself":          tx,
				"context":         tx.WithContext(t.Context()),
				"session":         tx.Session(&gorm.Session{}),
				"new":             tx.Session(&gorm.Session{NewDB: true}),
				"cached":          tx.Session(&gorm.Session{PrepareStmt: true}),
				"cached twice":    tx.Session(&gorm.Session{PrepareStmt: true}).Session(&gorm.Session{PrepareStmt: true}),
				"debug":           tx.Debug(),
				"where":           tx.Where("name = ?", "x"),
				"model and limit": tx.Model(&Row{}).Limit(1),
			} {
				if _, err := gormoutbox.From(handle); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
			c.add(t, tx, "inside")
			return errors.New("roll back")
		}
		_ = db.Transaction(check)
		_ = db.Transaction(func(tx *gorm.DB) error { return tx.Transaction(check) })
		_ = db.Session(&gorm.Session{PrepareStmt: true}).Transaction(check)
		tx := db.Begin(&sql.TxOptions{Isolation: sql.LevelSerializable})
		_ = check(tx)
		tx.Rollback()
		c.wantBoth(t, db)
	})
}

// C02
func TestFromRefusesWhatIsNoTransaction(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.open(t, gorm.Config{})
		err := db.Transaction(func(tx *gorm.DB) error {
			refused(t, "the outer handle", db, gormoutbox.ErrNotInTransaction)
			refused(t, "dry run", tx.Session(&gorm.Session{DryRun: true}), gormoutbox.ErrNotInTransaction, gormoutbox.ErrDryRun)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		tx := db.Begin()
		refused(t, "the outer handle after Begin", db, gormoutbox.ErrNotInTransaction)
		tx.Commit()
		refused(t, "after the commit", tx, gormoutbox.ErrNotInTransaction)

		tx = db.Begin()
		tx.Rollback()
		refused(t, "after the rollback", tx, gormoutbox.ErrNotInTransaction)

		err = db.Connection(func(conn *gorm.DB) error {
			refused(t, "a connection", conn, gormoutbox.ErrNotInTransaction)
			return conn.Transaction(func(tx *gorm.DB) error {
				refused(t, "a transaction on a connection", tx, gormoutbox.ErrNotInstalled)
				return nil
			})
		})
		if err != nil {
			t.Fatal(err)
		}
		var c calls
		err = db.Connection(func(conn *gorm.DB) error {
			if err := gormoutbox.Install(conn); err != nil {
				return err
			}
			refused(t, "an installed connection", conn, gormoutbox.ErrNotInTransaction)
			return conn.Transaction(func(tx *gorm.DB) error { c.add(t, tx, "row"); return nil })
		})
		c.wantBoth(t, db, "row")
		if err != nil {
			t.Fatal(err)
		}
		refused(t, "nil", nil, gormoutbox.ErrNotInTransaction)
		refused(t, "the zero handle", &gorm.DB{}, gormoutbox.ErrNotInTransaction)
	})
}

func TestFromRefusesTransactionsOfABarePool(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.bare(gorm.Config{})
		before := b.use(db).Begin()
		defer before.Rollback()
		refused(t, "not installed", before, gormoutbox.ErrNotInstalled)
		if _, err := gormoutbox.From(before); !strings.Contains(err.Error(), "call db.Use before opening transactions") {
			t.Errorf("%q does not tell what to do", err)
		}
		if err := gormoutbox.Install(db); err != nil {
			t.Fatal(err)
		}
		refused(t, "begun before", before, gormoutbox.ErrNotInstalled)
		refused(t, "no transaction", db, gormoutbox.ErrNotInTransaction)
	})
}

// C05
func TestFromAfterAFailure(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.open(t, gorm.Config{}, testdb.PoolSize(1))
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		tx := db.WithContext(ctx).Begin()
		refused(t, "Begin with an ended context", tx, context.Canceled)
		refused(t, "a session of it", tx.Session(&gorm.Session{PrepareStmt: true}), context.Canceled)
		tx.Rollback()
		tx.Commit()

		// The failed Begin without its error, as after a Session of GORM's that
		// forgets it.
		tx.Error = nil
		refused(t, "a transaction that never began", tx, gormoutbox.ErrNotInTransaction)
		if got := names(t, db); len(got) != 0 {
			t.Errorf("rows stored: %q", got)
		}
	})
}

// C05
func TestContextEndsWithinTheTransaction(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.open(t, gorm.Config{}, testdb.PoolSize(1))
		var c calls
		cause := errors.New("the client has gone")
		ctx, cancel := context.WithCancelCause(t.Context())
		err := db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
			c.add(t, tx, "before")
			cancel(cause)
			refused(t, "the context has ended", tx.WithContext(t.Context()), gormoutbox.ErrNotInTransaction, cause)
			return nil
		})
		if err == nil {
			t.Error("the commit succeeded")
		}
		c.wantBoth(t, db) // on the one connection, which is back
	})
}

func TestFromRefusesWhatSQLTextHasEnded(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.open(t, gorm.Config{})
		for _, text := range []string{"COMMIT", "rollback", " End;", "ROLLBACK TRANSACTION"} {
			var c calls
			tx := db.Begin()
			c.add(t, tx, "row")
			if err := tx.Exec(text).Error; err != nil {
				t.Fatal(err)
			}
			refused(t, text, tx, gormoutbox.ErrNotInTransaction)
			tx.Commit() // what it says is the driver's affair
			c.want(t)
		}
	})
}

// A statement runs on the transaction and nothing of the handle touches it.
func TestTxRunsSQLAsItIs(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		log := newRecorder()
		db := b.open(t, gorm.Config{Logger: log})
		err := db.Callback().Raw().Before("*").Register("test", func(*gorm.DB) { t.Error("a callback ran") })
		if err != nil {
			t.Fatal(err)
		}
		insert, count := "INSERT INTO rows (name) VALUES (?)", "SELECT count(*) FROM rows WHERE name = ?"
		if b.postgres {
			insert, count = "INSERT INTO rows (name) VALUES ($1)", "SELECT count(*) FROM rows WHERE name = $1"
		}
		err = db.Transaction(func(tx *gorm.DB) error {
			handle := tx.Model(&Row{}).Where("1 = 0").Clauses(clause.OnConflict{DoNothing: true}).Limit(0)
			own := from(t, handle)
			log.traces = nil
			result, err := own.ExecContext(t.Context(), insert, "a @name or two? $3")
			if err != nil {
				return err
			}
			if n, err := result.RowsAffected(); n != 1 || err != nil {
				t.Errorf("%d rows affected, %v", n, err)
			}
			rows, err := own.QueryContext(t.Context(), count, "a @name or two? $3")
			if err != nil {
				return err
			}
			defer rows.Close()
			var n int
			for rows.Next() {
				if err := rows.Scan(&n); err != nil {
					return err
				}
			}
			if n != 1 {
				t.Errorf("%d rows found, want 1", n)
			}
			return rows.Err()
		})
		if err != nil {
			t.Fatal(err)
		}
		if len(log.traces) != 0 {
			t.Errorf("the logger was told of %q", log.traces)
		}
		if cache, ok := db.ConnPool.(*gorm.PreparedStmtDB); ok {
			if keys := cache.Stmts.Keys(); slices.Contains(keys, insert) || slices.Contains(keys, count) {
				t.Errorf("the cache has %q", keys)
			}
		}
	})
}

func TestTxReportsErrors(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.open(t, gorm.Config{})
		tx := db.Begin()
		defer tx.Rollback()
		own := from(t, tx)
		if _, err := own.ExecContext(t.Context(), "INSERT INTO nowhere VALUES (1)"); err == nil {
			t.Error("ExecContext returned no error")
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		rows, err := own.QueryContext(ctx, "SELECT 1")
		if err != nil {
			return
		}
		defer rows.Close()
		t.Errorf("QueryContext returned no error (%v)", rows.Err())
	})
}
